"""The dot of every recipe, with its gradient, and its compute weights.

The recipe decides how a dot computes, not the hardware. So there is one
implementation, XLA's dots with the recipe's quantisers around them, and no row
in the dispatch table. The operations inside it have rows there
(`quantize_transpose`, `block_scaled_dot`).
"""
