"""Streams between workers: sockets handed over by the daemon, frames on them."""
