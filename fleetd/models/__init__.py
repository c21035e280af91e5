"""Models on disk: names, sources, verification, identity. Nothing here imports mlx."""
