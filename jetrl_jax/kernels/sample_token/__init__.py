"""Draws a token from logits."""
