"""Measures what the project promises and writes docs/benchmarks.md: ``make bench``, ``python -m bench``."""
