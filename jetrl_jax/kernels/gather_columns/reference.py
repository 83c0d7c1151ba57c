"""The gather of columns by XLA."""

from jetrl_jax.core.collectives import gather_columns

__all__ = ['gather_columns']
