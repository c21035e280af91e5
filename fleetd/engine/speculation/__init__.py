"""Speculative decoding in a worker: drafts, and their verification."""
