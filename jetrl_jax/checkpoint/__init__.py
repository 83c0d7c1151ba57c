"""States on disk: written whole or not at all, and read back checked."""
