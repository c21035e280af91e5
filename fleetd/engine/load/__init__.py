"""From a model's files to a loaded and measured model."""
