"""GGUF files: read with every count checked, and converted to a folder that mlx-lm loads."""
