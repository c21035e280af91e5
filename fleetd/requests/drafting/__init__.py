"""Drafters from the daemon's side: finding one for an answer, and drafting for others."""
