"""Rotary position embedding, with Llama 3's frequency scaling."""

import math

import jax.numpy as jnp
import numpy as np

from jetrl_jax.core.typing import Array, Float, Int
from jetrl_jax.kernels.rope_append import rotate
from jetrl_jax.models.types import ModelConfig

__all__ = ['inverse_frequencies', 'is_slow', 'rotate', 'rotation']

# Tokens in which a slow pair of channels turns by one radian at most.
_SLOW_TOKENS = 2**14


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


def is_slow(config: ModelConfig) -> np.ndarray:
  """Returns bool [H]: the channels that hardly turn.

  They turn by one radian or less in `_SLOW_TOKENS` tokens.
  """
  slow_F = inverse_frequencies(config) * np.float32(_SLOW_TOKENS) <= 1
  return np.tile(slow_F, 2)


def rotation(
    positions_M: Int[Array, ' M'], frequencies: np.ndarray
) -> tuple[Float[Array, 'M F'], Float[Array, 'M F']]:
  """Returns (cosines, sines) of each position's angles.

  `positions_M` must be an argument of the compiled function: constant
  positions would have their cosines folded on the host, with other bits.
  """
  angle = positions_M.astype(jnp.float32)[:, None] * frequencies[None]
  return jnp.cos(angle), jnp.sin(angle)
