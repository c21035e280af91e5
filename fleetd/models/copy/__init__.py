"""Copies of a model between machines: the two child processes, their messages, and the daemon's side."""
