"""Models whose layers are divided between machines: who is which rank, and how their ring is closed."""
