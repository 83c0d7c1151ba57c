"""Recipes: what a run quantises, and how.

A recipe is a frozen record. `fp8_delayed` quantises every dot of the blocks
(qkv, o, gate_up, down) per tensor with delayed scales; `bf16` runs the same
code with another dot. The language-model head, the embedding, the norms and
attention stay in high precision in every recipe: the head's dot is taken in
chunks, and a slot may serve one use only.
"""

import dataclasses
import re

import jax.numpy as jnp

from jetrl_jax.fp8 import formats

RECIPES = ('fp8_delayed', 'bf16')
ALWAYS_HIGH_PRECISION = ('lm_head', 'embed')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """How dots compute.

  Attributes:
    name: 'fp8_delayed' or 'bf16'.
    compute_dtype: dtype of activations and of weights that are not quantised,
      'bfloat16' or 'float32'.
    grad_format: format of output gradients in the backward dots, 'e4m3' (the
      default, as in the paper) or 'e5m2'.
    amax_history_length: entries of each amax history; one entry is one rollout
      for inputs and one optimiser step for kernels and output gradients.
    margin: head-room of the scales in bits.
    power_of_two_scales: round scales up to powers of two, so that scaling is
      exact and commutes with rounding.
    high_precision_layers: regular expressions, matched in full against a dot's
      path ('layers_0/attn/qkv'), of dots that stay in `compute_dtype` in
      rollout and training alike.
    calibrating: observe amaxes but compute in `compute_dtype` with the
      (de)quantised weights; used once, at a cold start.
  """

  name: str = 'fp8_delayed'
  compute_dtype: str = 'bfloat16'
  grad_format: str = 'e4m3'
  amax_history_length: int = 16
  margin: int = 0
  power_of_two_scales: bool = True
  high_precision_layers: tuple[str, ...] = ()
  calibrating: bool = False

  def __post_init__(self):
    if self.name not in RECIPES:
      raise ValueError(
          f'unknown recipe {self.name!r}; allowed: {list(RECIPES)}'
      )
    if self.compute_dtype not in ('bfloat16', 'float32'):
      raise ValueError(
          f'compute_dtype is {self.compute_dtype!r}; allowed: bfloat16, float32'
      )
    formats.format_named(self.grad_format)
    if self.amax_history_length < 2:
      raise ValueError(
          f'amax_history_length is {self.amax_history_length}; it must be >= 2:'
          ' one entry is in use while another is being filled'
      )
    if not 0 <= self.margin <= 16:
      raise ValueError(f'margin is {self.margin} bits; allowed: 0 to 16')
    for pattern in self.high_precision_layers:
      try:
        re.compile(pattern)
      except re.error as error:
        raise ValueError(
            f'high_precision_layers: {pattern!r} is no regular expression'
            f' ({error})'
        ) from error

  @property
  def dtype(self):
    """The compute dtype."""
    return jnp.dtype(self.compute_dtype)

  def quantizes(self, path: str) -> bool:
    """True when the dot at `path` runs in FP8."""
    if self.name == 'bf16' or path.split('/')[0] in ALWAYS_HIGH_PRECISION:
      return False
    return not any(re.fullmatch(p, path) for p in self.high_precision_layers)
