"""The dot of operands that have a scale per block."""
