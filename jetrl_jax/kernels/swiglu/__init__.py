"""SwiGLU that quantises what it gives, and its backward pass."""
