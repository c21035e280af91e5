"""The daemon's side of a worker: its life, the pool of workers, and the watch on its memory. No mlx here."""
