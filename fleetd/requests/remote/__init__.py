"""An attempt on another machine: its messages, its stream, and the check of its answer."""
