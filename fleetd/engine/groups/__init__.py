"""A model over several machines: each holds some of its layers and what they keep of sequences."""
