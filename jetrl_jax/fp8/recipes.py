"""Recipes: what a run quantises, and how.

A recipe is a frozen record; its name says how the dots of the blocks (qkv, o,
gate_up, down) compute:

    name          inputs            kernels        scales    backward
    fp8_delayed   per tensor        per tensor     delayed   FP8
    fp8_token     per row           per channel    dynamic   FP8
    fp8_block     1 x 128 along K   128 x 128      dynamic   FP8
    int8          per row           per channel    dynamic   compute dtype
    fake_*        per row           per channel    dynamic   compute dtype
    bf16          not quantised

A dynamic scale comes from the very values that it scales, so there is nothing
to calibrate; none looks beyond its row, so rollout and training agree. The
embedding, the norms and attention stay in high precision in every recipe, and
the language-model head unless `quantize_lm_head` says otherwise.
"""

import dataclasses
import difflib
import re

import jax.numpy as jnp

from jetrl_jax.fp8 import formats

# Fewer bits than tensor cores have, multiplied in the compute dtype.
FAKE_RECIPES = tuple(f'fake_{name}' for name in formats.FAKE)
RECIPES = ('fp8_delayed', 'fp8_token', 'fp8_block', 'int8', *FAKE_RECIPES)
RECIPES += ('bf16',)
# Recipes whose scales, if any, come from the values: they need no calibration.
UNCALIBRATED = tuple(name for name in RECIPES if name != 'fp8_delayed')
LM_HEAD = 'lm_head'
# Side of the blocks of `fp8_block`, and length of its groups.
BLOCK = 128


def _did_you_mean(name: str) -> str:
  # Of several that begin so the first, which is the default.
  name = name.lower()
  near = [known for known in RECIPES if name and known.startswith(name)]
  near = near or difflib.get_close_matches(name, RECIPES, n=1)
  return f'; did you mean {near[0]!r}?' if near else ''


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """How dots compute: formats, scales, and what stays in high precision.

  Attributes:
    name: 'fp8_delayed', 'fp8_token', 'fp8_block', 'int8': one 8-bit flow,
      scales per tensor, per row and channel, per 128 x 128 block, per row and
      channel; 'bf16': the same code with another dot. For experiments, rounded
      to a grid and multiplied in compute_dtype: 'fake_e4m3', 'fake_e5m2',
      'fake_int6', 'fake_int5', 'fake_int4', 'fake_int3'.
    compute_dtype: dtype of activations and of weights that are not quantised,
      'bfloat16' or 'float32'.
    grad_format: format of output gradients in the backward dots, 'e4m3' (as in
      the paper) or 'e5m2'; not read where the backward is in compute_dtype.
    amax_history_length: rollouts (inputs) or optimiser steps (kernels,
      gradients) that each amax history of 'fp8_delayed' remembers.
    margin: head-room of the scales, in bits.
    power_of_two_scales: round scales up to powers of two, so that scaling is
      exact and commutes with rounding.
    high_precision_layers: regular expressions of dots kept in compute_dtype on
      both sides, besides embedding, norms and attention: ('layers_0/.*',
      '.*/mlp/down'). They match a dot's whole path ('layers_0/attn/qkv').
    quantize_lm_head: whether lm_head is quantised like the dots of the blocks,
      on both sides and in its gradients (docs/tuning.md). Not for tied
      embeddings, whose table is both.
    min_sqnr_db: dots whose input or kernel keeps less than this many dB of
      signal over quantisation noise at the cold start stay in compute_dtype
      too; 0 chooses none. In a mixed flow one side that quantises is enough to
      choose, and both sides keep.
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
  quantize_lm_head: bool = False
  min_sqnr_db: float = 0.0
  calibrating: bool = False

  def __post_init__(self):
    if self.name not in RECIPES:
      raise ValueError(
          f'recipe is {self.name!r}; allowed: {", ".join(RECIPES)}'
          + _did_you_mean(self.name)
      )
    if self.compute_dtype not in ('bfloat16', 'float32'):
      raise ValueError(
          f'compute_dtype is {self.compute_dtype!r}; allowed: bfloat16, float32'
      )
    if self.grad_format not in formats.FORMATS:
      raise ValueError(
          f'grad_format is {self.grad_format!r}; allowed:'
          f' {", ".join(formats.FORMATS)}'
      )
    if not 2 <= self.amax_history_length <= 4096:
      raise ValueError(
          f'amax_history_length is {self.amax_history_length}; allowed: 2 (one'
          ' entry is in use while another is being filled) to 4096'
      )
    if not 0 <= self.margin <= 16:
      raise ValueError(f'margin is {self.margin} bits; allowed: 0 to 16')
    if not 0 <= self.min_sqnr_db <= 100:
      raise ValueError(
          f'min_sqnr_db is {self.min_sqnr_db} dB; allowed: 0 (off) to 100. E4M3'
          ' keeps about 31 dB of Gaussian values, INT8 per row 36 to 40'
      )
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

  @property
  def grad_dtype(self):
    """The 8-bit format of output gradients."""
    return formats.FORMATS[self.grad_format]

  @property
  def scaling(self) -> dict:
    """How an amax becomes a scale, see `scale_from_amax`."""
    return {'margin': self.margin, 'power_of_two': self.power_of_two_scales}

  @property
  def is_delayed(self) -> bool:
    """True when scales come from histories, which a cold start must fill."""
    return self.name == 'fp8_delayed'

  @property
  def may_scale_late(self) -> bool:
    """True when whoever reads a product may scale it, to the same bits."""
    is_exact = self.is_delayed and self.power_of_two_scales
    return is_exact and not self.calibrating

  @property
  def needs_calibration(self) -> bool:
    """True when a cold start must look at real tokens first."""
    return self.is_delayed or (self.name != 'bf16' and self.min_sqnr_db > 0)

  def with_high_precision(self, paths: tuple[str, ...]) -> 'Recipe':
    """Returns the recipe with these dots in high precision as well."""
    patterns = tuple(re.escape(path) for path in paths)
    return dataclasses.replace(
        self, high_precision_layers=self.high_precision_layers + patterns
    )

  def check_kernel(self, path: str, shape: tuple[int, ...], parts: int = 1):
    """Refuses a kernel that the recipe cannot quantise.

    Args:
      path: the path of the dot.
      shape: [out, in].
      parts: devices over which the first dim is split.

    Raises:
      ValueError: `fp8_block`, and a dim is no multiple of 128.
    """
    if self.name != 'fp8_block' or not self.quantizes(path):
      return
    out_dim, in_dim = shape
    split = parts > 1 and out_dim % parts == 0
    step = BLOCK * parts if split else BLOCK
    if out_dim % step or in_dim % BLOCK:
      raise ValueError(
          f'recipe fp8_block quantises in blocks of {BLOCK} x {BLOCK}, but'
          f' {path} has [out, in] = [{out_dim}, {in_dim}]; out must be a'
          f' multiple of {step}'
          + (f' (its rows are split over {parts} devices)' if split else '')
          + f' and in of {BLOCK}. Use fp8_token, or keep this dot in high'
          ' precision with precision.high_precision_layers'
      )

  def quantizes(self, path: str) -> bool:
    """True when the dot at `path` runs in 8 bits."""
    if self.name == 'bf16' or path.split('/')[0] == 'embed':
      return False
    if path == LM_HEAD and not self.quantize_lm_head:
      return False
    return not any(re.fullmatch(p, path) for p in self.high_precision_layers)
