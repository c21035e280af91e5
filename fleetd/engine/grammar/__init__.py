"""Grammars of whole answers, and the masks that hold an answer to one. No mlx: masks are the sampler's to use."""
