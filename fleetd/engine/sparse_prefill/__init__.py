"""Sparse prefill: only the kept tokens of a prompt are computed, each at its original position."""
