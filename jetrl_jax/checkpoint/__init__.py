"""States on disk: saved atomically, verified when they are read."""
