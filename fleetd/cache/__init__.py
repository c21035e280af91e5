"""Keys and values of prompts at rest: blocks on this machine's disk, sealed, with a quota."""
