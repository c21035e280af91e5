"""Shared prefill from the daemon's side: planned, agreed with helpers, watched, and helping others."""
