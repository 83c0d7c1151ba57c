"""What is added to a score before it becomes an advantage."""

import numpy as np

from jetrl_jax.core.typing import Float, Int, NpArray


def overlong_penalty(
    lengths_PG: Int[NpArray, 'P G'],
    *,
    max_response_length: int,
    buffer_length: int,
    penalty_factor: float,
) -> Float[NpArray, 'P G']:
  """Punishes answers that come near the length limit, softly.

      0                                where len <= Lmax - Lc
      (Lmax - Lc - len) / Lc           where Lmax - Lc < len <= Lmax
      -1                               beyond

  times the factor. With Lmax 8, Lc 4: lengths 4, 5, 8 get 0, -1/4, -1.

  Args:
    lengths_PG: response tokens, the stop token included.
    max_response_length: Lmax, tokens; an answer that was cut there gets -1.
    buffer_length: Lc, tokens, in [1, Lmax].
    penalty_factor: the largest penalty.

  Returns:
    Penalties in [-penalty_factor, 0], float64.

  References:
    DAPO, arXiv:2503.14476, eq. 13; the factor is verl's.
  """
  start = max_response_length - buffer_length
  share = np.clip((lengths_PG - start) / buffer_length, 0.0, 1.0)
  # Not -0.0, which would print as such.
  return 0.0 - penalty_factor * share
