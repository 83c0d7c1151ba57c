"""Terms that are added to a score before advantages are computed."""

import numpy as np

from jetrl_jax.core.typing import Float, Int, NpArray


def overlong_penalty(
    lengths_PG: Int[NpArray, 'P G'],
    *,
    max_response_length: int,
    buffer_length: int,
    penalty_factor: float,
) -> Float[NpArray, 'P G']:
  """Returns a soft penalty for responses near the length limit.

  It is the penalty factor times

      0                                where len <= Lmax - Lc
      (Lmax - Lc - len) / Lc           where Lmax - Lc < len <= Lmax
      -1                               beyond

  With Lmax 8, Lc 4 and factor 1, lengths 4, 5, 8 get 0, -1/4, -1.

  Args:
    lengths_PG: response tokens, with the stop token.
    max_response_length: Lmax, tokens; a response that was cut there gets -1.
    buffer_length: Lc, tokens, in [1, Lmax].
    penalty_factor: the largest penalty.

  Returns:
    Penalties in [-penalty_factor, 0], float64.

  References:
    DAPO, arXiv:2503.14476, eq. 13; the factor is verl's.
  """
  start = max_response_length - buffer_length
  share = np.clip((lengths_PG - start) / buffer_length, 0.0, 1.0)
  # Subtracting from 0.0 avoids -0.0.
  return 0.0 - penalty_factor * share
