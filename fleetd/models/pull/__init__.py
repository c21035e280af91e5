"""Downloads: the child process that fetches a model, and the daemon's side of it."""
