"""What a model keeps of one sequence, layer by layer: the one place that knows mlx-lm's kinds of caches."""
