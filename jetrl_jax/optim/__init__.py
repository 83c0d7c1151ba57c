"""From gradients to the next weights: clip, AdamW, rounding, requantising."""
