"""A model as a list of layers, and prefill with it."""
