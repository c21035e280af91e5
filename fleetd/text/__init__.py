"""Texts from outside, made harmless: bounded, printable, not too deep."""
