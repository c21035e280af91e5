"""The members of the fleet as requests see them: which to ask, and which claims to believe."""
