"""Metrics of a run: the writer, the console, timers, provenance."""
