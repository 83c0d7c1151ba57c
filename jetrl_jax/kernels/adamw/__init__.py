"""AdamW of one leaf, with moments that rest in 8 bits."""
