"""What a run would need in memory, time and disk: main --dry_run."""
