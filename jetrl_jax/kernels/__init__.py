"""Operations with more than one implementation, and which one runs."""
