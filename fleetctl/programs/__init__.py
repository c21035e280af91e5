"""What other programs of this machine, coding agents above all, are given so that they use its models."""
