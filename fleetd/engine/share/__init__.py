"""Shared prefill: what several machines' workers do to compute one prompt together, and say to each other."""
