import functools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jetrl_jax.rl.scoring import reward_shaping

_penalty = functools.partial(
    reward_shaping.overlong_penalty, max_response_length=8, buffer_length=4
)


def test_the_penalty_is_0_then_a_line_then_minus_1():
  found = _penalty(np.array([[1, 4, 5, 6, 7, 8, 9]]), penalty_factor=1.0)
  np.testing.assert_array_equal(found, [[0, 0, -0.25, -0.5, -0.75, -1, -1]])
  assert not np.signbit(found[0, :2]).any()


def test_dapos_numbers():
  # Lmax 20480, Lc 4096: from 16384 on.
  found = reward_shaping.overlong_penalty(
      np.array([[16384, 17408, 20480]]),
      max_response_length=20480,
      buffer_length=4096,
      penalty_factor=1.0,
  )
  np.testing.assert_array_equal(found, [[0.0, -0.25, -1.0]])


@given(st.integers(1, 8), st.floats(0.1, 10))
def test_the_penalty_is_verl_s_up_to_the_limit(length, factor):
  # min(-exceed / Lc * factor, 0), exceed = len - (Lmax - Lc).
  expected = min(-(length - 4) / 4 * factor, 0)
  found = _penalty(np.array([[length]]), penalty_factor=factor)
  np.testing.assert_allclose(found, [[expected]], rtol=1e-12)
