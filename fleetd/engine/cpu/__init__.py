"""Exact arithmetic on a processor, if there is no GPU. Imports nothing of the engine."""
