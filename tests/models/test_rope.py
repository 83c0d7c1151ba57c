import math

import jax.numpy as jnp
import numpy as np

from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.models import rope
from jetrl_jax.models.types import Llama3RopeScaling
from tests.models import tiny


@exact_jit
def _rotate(x, positions, frequencies):
  return rope.rotate(x, *rope.rotation(positions, frequencies))


def _normal(*shape):
  return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _reference(x, positions, frequencies):
  """Complex rotation of (first half, second half) pairs, in float64."""
  half = x.shape[-1] // 2
  angle = positions[:, None, None] * np.asarray(frequencies, np.float64)
  turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
  return np.concatenate([turned.real, turned.imag], axis=-1)


def test_the_frequencies_by_hand():
  # theta^(-2i/H) with theta 16 and H 8: 16^0, 16^-1/4, 16^-1/2, 16^-3/4.
  cfg = tiny.config('qwen2', rope_theta=16.0, head_dim=8)
  np.testing.assert_allclose(
      rope.inverse_frequencies(cfg), [1, 1 / 2, 1 / 4, 1 / 8], rtol=1e-6
  )


def test_slow_channels_turn_by_a_radian_at_most_in_16384_tokens():
  # Frequencies 1, 2^-14, 2^-28 and 2^-42, by halves of a head.
  cfg = tiny.config('qwen2', rope_theta=2.0**56, head_dim=8)
  expected = [False, True, True, True]
  np.testing.assert_array_equal(rope.is_slow(cfg), expected * 2)


def test_llama_3_keeps_blends_and_divides_by_hand():
  # C = 32, low 1, high 4, factor 8. theta is chosen for wavelengths 2 pi, 16
  # and 128/pi = 40.7:
  #   2 pi < 32/4 = 8           kept:    1
  #   8 < 16 < 32               blended: smooth = (32/16 - 1) / (4 - 1) = 1/3,
  #                             f (2/3 / 8 + 1/3) = f 5/12, f = pi/8
  #   40.7 > 32                 divided: f / 8, f = (pi/8)^2
  scaling = Llama3RopeScaling(
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=32,
  )
  cfg = tiny.config(
      'llama',
      head_dim=6,
      rope_theta=(8 / math.pi) ** 3,
      rope_scaling=scaling,
  )
  f = math.pi / 8
  np.testing.assert_allclose(
      rope.inverse_frequencies(cfg), [1, f * 5 / 12, f**2 / 8], rtol=1e-6
  )


def test_a_quarter_turn_by_hand():
  # Angle pi/2 takes (first, second) to (-second, first).
  x = np.asarray([[[1.0, 2.0, 3.0, 4.0]]], np.float32)
  y = _rotate(x, np.asarray([1]), np.full(2, math.pi / 2, np.float32))
  np.testing.assert_allclose(np.asarray(y)[0, 0], [-3, -4, 1, 2], atol=1e-6)


def test_position_0_changes_nothing():
  x = _normal(16, 2, 8)
  y = _rotate(x, np.zeros(16, np.int32), np.ones(4, np.float32))
  np.testing.assert_array_equal(x, y)


def test_rotation_equals_a_complex_float64_product():
  cfg = tiny.config('qwen2', head_dim=8)
  frequencies = rope.inverse_frequencies(cfg)
  positions = np.concatenate([np.arange(60), [1000, 4095, 32767, 131071]])
  x = _normal(64, 3, 8)
  y = _rotate(x, positions, frequencies)
  expected = _reference(x, positions, frequencies)
  # float32: half a step of the angle, then some roundings of the result.
  bound = (positions * 2.0**-24 + 2.0**-21)[:, None, None] * np.abs(x).max()
  assert np.all(np.abs(np.asarray(y, np.float64) - expected) <= 2 * bound)


def test_scores_depend_on_the_distance_alone():
  cfg = tiny.config('qwen2', head_dim=8)
  frequencies = rope.inverse_frequencies(cfg)
  q, k = _normal(2, 1, 1, 8)

  def score(query_at, key_at):
    turned = [
        np.asarray(_rotate(x, np.asarray([at]), frequencies))
        for x, at in ((q, query_at), (k, key_at))
    ]
    return np.sum(turned[0] * turned[1])

  np.testing.assert_allclose(score(7, 3), score(47, 43), rtol=1e-4)
  assert abs(score(7, 3) - score(7, 5)) > 1e-2


def test_bfloat16_is_rounded_once_at_the_end():
  cfg = tiny.config('qwen2', head_dim=8)
  frequencies = rope.inverse_frequencies(cfg)
  x = _normal(64, 3, 8).astype(jnp.bfloat16)
  positions = np.arange(64)
  y = _rotate(x, positions, frequencies)
  fine = _rotate(x.astype(np.float32), positions, frequencies)
  np.testing.assert_array_equal(y, np.asarray(fine).astype(jnp.bfloat16))


def test_the_bits_of_a_row_do_not_depend_on_the_number_of_rows():
  frequencies = rope.inverse_frequencies(tiny.config('qwen2', head_dim=8))
  x = _normal(512, 3, 8).astype(jnp.bfloat16)
  positions = np.arange(512)
  whole = np.asarray(_rotate(x, positions, frequencies))
  for start in (0, 112, 496):
    part = slice(start, start + 16)
    np.testing.assert_array_equal(
        _rotate(x[part], positions[part], frequencies), whole[part]
    )
