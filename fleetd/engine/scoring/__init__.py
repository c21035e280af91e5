"""Scoring in a worker: how much the question of a prompt attends to each of its tokens."""
