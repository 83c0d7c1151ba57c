import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_jax.rl import segments

_SUM = jax.jit(segments.segment_sum)
_LENGTH = 64


def _row(pieces: list[np.ndarray], starts: list[int]):
  """Puts sequences at the starts of a row of 64; returns (values, ids)."""
  values_T = np.zeros(_LENGTH, np.float32)
  ids_T = np.zeros(_LENGTH, np.int32)
  for i, (piece, start) in enumerate(zip(pieces, starts, strict=True)):
    values_T[start : start + len(piece)] = piece
    ids_T[start : start + len(piece)] = i + 1
  return jnp.asarray(values_T), jnp.asarray(ids_T)


def test_every_token_gets_the_sum_of_its_own_segment():
  found = segments.segment_sum(
      jnp.array([1.0, 2.0, 4.0, 9.0, 8.0]), jnp.array([1, 1, 1, 0, 2])
  )
  np.testing.assert_array_equal(found, [7.0, 7.0, 7.0, 0.0, 8.0])
  # As many segments as there are tokens.
  found = segments.segment_sum(jnp.array([1.0, 2.0, 4.0]), jnp.arange(1, 4))
  np.testing.assert_array_equal(found, [1.0, 2.0, 4.0])


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 16), min_size=1, max_size=4),
)
def test_a_sum_has_the_same_bits_wherever_the_sequence_lies(seed, lengths):
  rng = np.random.default_rng(seed)
  pieces = [
      # Sizes that round differently in any other order.
      (rng.normal(size=n) * 10.0 ** rng.integers(-4, 5, n)).astype(np.float32)
      for n in lengths
  ]
  packed_T, ids_T = _row(pieces, [16 * i for i in range(len(pieces))])
  together = _SUM(packed_T, ids_T)
  for i, piece in enumerate(pieces):
    alone_T, alone_ids_T = _row([piece], [3])
    alone = _SUM(alone_T, alone_ids_T)[3]
    expected = np.float32(0)
    for value in piece:
      expected = np.float32(expected + value)
    assert np.asarray(together)[16 * i] == np.asarray(alone) == expected


def test_a_mean_counts_the_masked_tokens_alone_and_reads_no_others():
  values_T = jnp.array([jnp.nan, 1.0, 3.0, jnp.inf, 5.0, 6.0, jnp.nan])
  mask_T = jnp.array([0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
  ids_T = jnp.array([1, 1, 1, 2, 2, 3, 3])
  found = segments.segment_mean(values_T, mask_T, ids_T)
  np.testing.assert_array_equal(found, [2.0, 2.0, 2.0, 0.0, 0.0, 6.0, 6.0])
