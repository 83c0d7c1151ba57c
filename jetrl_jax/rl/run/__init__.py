"""What a run is made of before a step: its spec, state, programs, checks."""
