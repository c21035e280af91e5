"""A job and its events, for every dialect."""
