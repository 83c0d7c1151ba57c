"""Hugging Face's files, read and written by the same tables."""
