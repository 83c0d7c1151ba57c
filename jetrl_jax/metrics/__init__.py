"""Numbers out: the writer of scalars, the console, timers, provenance."""
