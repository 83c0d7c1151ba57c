"""Gate, up and SwiGLU as one operation."""
