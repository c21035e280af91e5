"""Shared prefill in a worker: what several machines' workers do to compute one prompt together."""
