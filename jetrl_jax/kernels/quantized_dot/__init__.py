"""The dot of every recipe, with its gradient, and its compute weights."""
