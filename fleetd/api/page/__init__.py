"""The fleet on one page: who may see it, and its files."""
