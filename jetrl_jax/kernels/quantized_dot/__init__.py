"""The dot of every recipe, with its gradient, and its compute weights.

It is the recipe's and not the hardware's: it has one implementation, XLA's dots
with the recipe's quantisers around them, and no row in the dispatch table. The
operations that it is made of have (`quantize_transpose`, `block_scaled_dot`).
"""
