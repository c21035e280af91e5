"""Shared prefill from the daemon's side: asking helpers, and helping others."""
