"""Draws a token from each row of tempered logits.

    token = argmax_v (z_v + g_v),    g ~ Gumbel(0, 1), independent
    z = max(logits * inverse, lowest float32)

v goes over the tokens of the mask, if there is one. Among equal values the
lowest token wins. A greedy row has no noise. A row's token depends only on its
own logits and key. Each implementation has noise of its own: it repeats its own
tokens, and the two draw different ones.
"""

import jax

from jetrl_jax.core.typing import Array, Bool, Float, Int, PRNGKey
from jetrl_jax.kernels import dispatch, log_sum_exp, stands_for
from jetrl_jax.kernels.sample_token import reference
from jetrl_jax.kernels.sample_token.reference import gumbel_argmax, truncate

__all__ = ['draw', 'gumbel_argmax', 'truncate']


def draw(
    logits_BV: Float[Array, 'B V'],
    inverse_B: Float[Array, ' B'],
    mask_BV: Bool[Array, 'B V'] | None,
    keys_B: PRNGKey,
    *,
    greedy_B: Bool[Array, ' B'],
) -> tuple[Int[Array, ' B'], Float[Array, ' B'] | None]:
  """Draws a token for every row.

  Args:
    logits_BV: float32.
    inverse_B: float32, see `logprobs.inverse_temperature`.
    mask_BV: tokens that may be drawn; None for all.
    keys_B: the rows' keys.
    greedy_B: rows at temperature 0.

  Returns:
    (int32 token ids, the log-sum-exp of z with the bits of
    `log_sum_exp.row_stats`, or None where it is not made on the way)
  """
  name = dispatch.implementation('sample_token')
  match name:
    case 'mosaic_sm90' if mask_BV is None:
      from jetrl_jax.kernels.sample_token import mosaic_sm90

      impl = jax.random.key_impl(keys_B)

      def run(*operands):
        with jax.named_scope('sampling'):
          return mosaic_sm90.draw(*operands)

      def both(logits_BV, inverse_B, key_data_B2, greedy_B):
        keys_B = jax.random.wrap_key_data(key_data_B2, impl=impl)
        with jax.named_scope('sampling'):
          token_B = reference.draw(logits_BV, inverse_B, None, keys_B, greedy_B)
        with jax.named_scope('head'):
          return token_B, log_sum_exp.row_stats(logits_BV, inverse_B)[0]

      key_data_B2 = jax.random.key_data(keys_B)
      operands = logits_BV, inverse_B, key_data_B2, greedy_B
      return stands_for.kernel('sample_token', name, run, both, *operands)
    case _:
      operands = logits_BV, inverse_B, mask_BV, keys_B, greedy_B
      with jax.named_scope('sampling'):
        return reference.draw(*operands), None
