"""Speculative decoding in a worker: drafts from several sources, verified in blocks, never another answer."""
