"""Gradients to the next weights: clip, AdamW, rounding, quantisation."""
