"""The verbs of the command line: each module has one, as ``command``."""
