"""Rotary position embedding, with Llama 3's frequency scaling."""

import math

import jax.numpy as jnp
import numpy as np

from jetrl_jax.models.types import ModelConfig
from jetrl_jax.typing import Array, Float, Int


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
  """Returns float32 [H/2], radians per position.

      f_i = theta^(-2i/H)

  Llama 3 keeps wavelengths below `original / high_freq_factor`, divides
  those above `original / low_freq_factor` by `factor`, and interpolates between
  (as in transformers' `_compute_llama3_parameters`).
  """
  half = config.head_dim // 2
  # float32 throughout, like the reference implementation.
  exponent = np.arange(half, dtype=np.float32) * 2 / config.head_dim
  freq = (1.0 / np.power(np.float32(config.rope_theta), exponent)).astype(
      np.float32
  )
  scaling = config.rope_scaling
  if scaling is None:
    return freq
  original = scaling.original_max_position_embeddings
  wavelength = 2 * math.pi / freq
  smooth = (original / wavelength - scaling.low_freq_factor) / (
      scaling.high_freq_factor - scaling.low_freq_factor
  )
  between = (1 - smooth) * freq / scaling.factor + smooth * freq
  scaled = np.where(
      wavelength > original / scaling.low_freq_factor,
      freq / scaling.factor,
      between,
  )
  return np.where(
      wavelength < original / scaling.high_freq_factor, freq, scaled
  ).astype(np.float32)


def rotate(
    x_MNH: Float[Array, 'M N H'],
    positions_M: Int[Array, ' M'],
    frequencies: np.ndarray,
) -> Float[Array, 'M N H']:
  """Rotates (first half, second half) pairs of each head by position.

  Computed in float32 and rounded once. `positions_M` must be an argument of
  the compiled function: constant positions would have their cosines folded on
  the host, with other bits.
  """
  positions_M11 = positions_M.astype(jnp.float32)[:, None, None]
  angle = positions_M11 * frequencies[None, None]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  first, second = jnp.split(x_MNH.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate(
      [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return rotated.astype(x_MNH.dtype)
