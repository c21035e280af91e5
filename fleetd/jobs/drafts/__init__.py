"""Drafters from the daemon's side: found, introduced to the answer they draft for, and serving others."""
