"""Pairing: how two machines that have never met come to trust each other by a code that a person carries."""
