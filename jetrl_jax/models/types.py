"""The shape of a decoder: everything that its tree and its forward depend on.

A `ModelConfig` says what a checkpoint *is*, not how it is run: precision,
sharding and attention tiles live with the code that owns them. Left out on
purpose: mixture of experts, sliding windows, biases outside of q/k/v.
"""

import dataclasses
from typing import NamedTuple


class Traits(NamedTuple):
  """What an architecture fixes; see the fields of `ModelConfig`."""

  qkv_bias: bool
  qk_norm: bool


FAMILY_TRAITS = {
    'qwen2': Traits(qkv_bias=True, qk_norm=False),
    'qwen3': Traits(qkv_bias=False, qk_norm=True),
    'llama': Traits(qkv_bias=False, qk_norm=False),
    'mistral': Traits(qkv_bias=False, qk_norm=False),
}
FAMILIES = tuple(FAMILY_TRAITS)

_MAX_COUNT = 2**31 - 1
_MAX_NUMBER = 1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
  """Llama 3.1's stretching of the slow rotary frequencies.

  With wavelength w = 2 pi / frequency and C = original_max_position_embeddings:
  w < C / high_freq_factor keeps its frequency, w > C / low_freq_factor is
  divided by `factor`, and those between are blended linearly in C / w.

  Attributes:
    factor: division of the slow frequencies, >= 1.
    low_freq_factor: C over the longest wavelength that is still blended.
    high_freq_factor: C over the longest wavelength that is left alone.
    original_max_position_embeddings: C, tokens.

  References:
    Grattafiori et al. 2024, arXiv:2407.21783, section 3.4.2.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position_embeddings: int

  def __post_init__(self):
    for name in ('factor', 'low_freq_factor', 'high_freq_factor'):
      _require_positive(self, name)
    _require_count(self, 'original_max_position_embeddings')
    if self.factor < 1:
      raise ValueError(f'rope factor {self.factor!r}: allowed are >= 1')
    if self.high_freq_factor <= self.low_freq_factor:
      raise ValueError(
          f'rope high_freq_factor {self.high_freq_factor!r} must be above '
          f'low_freq_factor {self.low_freq_factor!r}'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """The shape of one dense decoder.

  Attributes:
    family: 'qwen2' (also Qwen2.5), 'qwen3', 'llama' (LlamaForCausalLM: Llama 3,
      SmolLM2) or 'mistral' (MistralForCausalLM without a window).
    vocab_size: V, rows of the embedding.
    num_layers: L.
    model_dim: D.
    num_heads: N, query heads.
    num_kv_heads: K, key/value heads; divides N.
    head_dim: H, even; not always D / N.
    ffn_dim: F.
    norm_eps: added to the mean square in every RMSNorm.
    rope_theta: base of the rotary wavelengths.
    rope_scaling: None for plain rotary embeddings.
    max_position: tokens the checkpoint was made for.
    qkv_bias: q, k and v projections have biases; true for Qwen2 alone.
    qk_norm: q and k are normalised per head; true for Qwen3 alone.
    tied_embeddings: the output projection is the embedding.

  Raises:
    ValueError: on a value no supported decoder can have.
  """

  family: str
  vocab_size: int
  num_layers: int
  model_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  ffn_dim: int
  norm_eps: float
  rope_theta: float
  rope_scaling: Llama3RopeScaling | None
  max_position: int
  qkv_bias: bool
  qk_norm: bool
  tied_embeddings: bool

  def __post_init__(self):
    if self.family not in FAMILY_TRAITS:
      raise ValueError(
          f'family {self.family!r}: allowed are {", ".join(FAMILIES)}'
      )
    for name in (
        'vocab_size',
        'num_layers',
        'model_dim',
        'num_heads',
        'num_kv_heads',
        'head_dim',
        'ffn_dim',
        'max_position',
    ):
      _require_count(self, name)
    _require_positive(self, 'norm_eps')
    _require_positive(self, 'rope_theta')
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
          f'num_heads {self.num_heads} must be a multiple of num_kv_heads '
          f'{self.num_kv_heads}'
      )
    if self.head_dim % 2:
      raise ValueError(f'head_dim {self.head_dim} must be even (rotary pairs)')
    for name in ('qkv_bias', 'qk_norm', 'tied_embeddings'):
      value = self.__dict__[name]
      if not isinstance(value, bool):
        raise ValueError(f'{name} {value!r}: allowed are True and False')
    for name, fixed in FAMILY_TRAITS[self.family]._asdict().items():
      if self.__dict__[name] != fixed:
        raise ValueError(
            f'{name} {self.__dict__[name]}: family {self.family!r} has {fixed}'
        )
    scaling = self.rope_scaling
    if scaling is not None and not isinstance(scaling, Llama3RopeScaling):
      raise ValueError(
          f'rope_scaling {scaling!r}: allowed are None and Llama3RopeScaling'
      )

  @property
  def num_params(self) -> int:
    """Numbers in the tree; tied embeddings counted once."""
    d, f, h = self.model_dim, self.ffn_dim, self.head_dim
    qkv_rows = (self.num_heads + 2 * self.num_kv_heads) * h
    layer = qkv_rows * d + d * self.num_heads * h + 3 * d * f + 2 * d
    if self.qkv_bias:
      layer += qkv_rows
    if self.qk_norm:
      layer += 2 * h
    embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * d
    return embeddings + self.num_layers * layer + d


def _require_count(config, name: str) -> None:
  value = config.__dict__[name]
  whole = isinstance(value, int) and not isinstance(value, bool)
  if not (whole and 1 <= value <= _MAX_COUNT):
    raise ValueError(
        f'{name} {value!r:.100}: allowed are integers from 1 to {_MAX_COUNT}'
    )


def _require_positive(config, name: str) -> None:
  value = config.__dict__[name]
  number = isinstance(value, (int, float)) and not isinstance(value, bool)
  # The upper bound refuses infinity, and integers that no float can hold.
  if not (number and 0 < value <= _MAX_NUMBER):
    raise ValueError(
        f'{name} {value!r:.100}: allowed are numbers above 0, at most '
        f'{_MAX_NUMBER:g}'
    )
