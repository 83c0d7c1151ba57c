"""Compares two forwards op by op, bit by bit."""

import dataclasses

import numpy as np

from jetrl_jax.kernels.dispatch import Kernels
from jetrl_jax.mismatch.taps import LOGITS, LOGSUMEXP
from jetrl_jax.models.types import ModelConfig
from jetrl_jax.rl.packing import Placement
from jetrl_jax.rl.types import Completion

_LAYERS_AT_ONCE = 4
_OPS = (
    'attn_norm/in',
    'attn_norm/out',
    'attn_norm/out_fp8',
    'attn/qkv/out',
    'attn/q_norm/out',
    'attn/k_norm/out',
    'attn/rope_q',
    'attn/rope_k',
    'attn/attention',
    'attn/attention_fp8',
    'attn/o/out',
    'mlp_norm/in',
    'mlp_norm/out',
    'mlp_norm/out_fp8',
    'mlp/gate_up/out',
    'mlp/swiglu',
    'mlp/down/out',
)
# An op's last names -> (operation of decode, of training) that makes it.
_MADE_BY = {
    'norm/in': ('add_norm_quantize', ''),
    'norm/out': ('add_norm_quantize', 'add_norm_quantize'),
    'norm/out_fp8': ('add_norm_quantize', 'add_norm_quantize'),
    'attn/rope_q': ('rope_append', ''),
    'attn/attention': ('decode_attention', 'attention'),
    'attn/attention_fp8': ('decode_attention', 'attention'),
    'mlp/swiglu': ('swiglu', 'swiglu'),
    LOGSUMEXP: ('sample_token', 'log_sum_exp'),
}
LOGPROB = 'logprob'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
  """A response, and its place in the training forward.

  Attributes:
    completion: the response with the rollout's log-probs.
    place: its place in the micro-batch.
    trained: float32 [prompt + response], nats, the training forward's
      log-probs.
  """

  completion: Completion
  place: Placement
  trained: np.ndarray

  @property
  def theirs(self) -> np.ndarray:
    """The training forward's log-probs of the response."""
    return self.trained[len(self.completion.prompt_tokens) :]

  @property
  def first_unequal(self) -> int:
    """The first token that differs; the response's length without any."""
    differs = bits(self.completion.logprobs) != bits(self.theirs)
    return int(np.argmax(differs)) if differs.any() else len(differs)

  @property
  def agrees(self) -> bool:
    """Whether no token differs."""
    return self.first_unequal == len(self.completion.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
  """The comparison of one op.

  Attributes:
    op: its path, or 'logits', 'logsumexp', 'logprob'.
    unequal: elements that differ in any bit.
    elements: elements compared.
    largest: largest difference, in the op's own unit.
    where: the first token that differs, as text; '' without a difference.
  """

  op: str
  unequal: int
  elements: int
  largest: float
  where: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
  """The result of a bisection.

  Attributes:
    rows: ops in the forward's order, up to the window of the first difference.
    tokens: response tokens of the compared sequences.
    sequences: number of compared sequences.
    unseen: ops that only lie within a kernel, on one side at least.
    disturbed: tokens whose log-prob changed with the taps (rollout, training).
    one_by_one: whether each op was tapped in programs of its own.
  """

  rows: list[Compared]
  tokens: int
  sequences: int
  unseen: tuple[str, ...]
  disturbed: tuple[int, int]
  one_by_one: bool

  @property
  def first(self) -> Compared | None:
    """The first op that differs; None if all agree."""
    return next((row for row in self.rows if row.unequal), None)


def bits(x: np.ndarray) -> np.ndarray:
  """Returns the bits of an array as integers of its width."""
  return np.asarray(x).view(f'u{np.asarray(x).dtype.itemsize}')


def ops(model: ModelConfig) -> list[str]:
  """Returns all ops in the order of the forward."""
  heads = () if model.qk_norm else ('attn/q_norm/out', 'attn/k_norm/out')
  layers = [
      f'layers_{i}/{op}'
      for i in range(model.num_layers)
      for op in _OPS
      if op not in heads
  ]
  head = ['final_norm/in', 'final_norm/out', LOGITS, LOGSUMEXP, LOGPROB]
  return ['embed/out', *layers, *head]


def made_by(op: str, rollout: Kernels, training: Kernels) -> str:
  """Says which implementations make an op's values, '' for XLA alone.

  Args:
    op: as `Compared` has it.
    rollout: the log-probs of the rollout.
    training: the log-probs of the training forward.
  """
  for name, operations in _MADE_BY.items():
    if op.endswith(name) or f'{op}/out'.endswith(name):
      sides = [
          ('rollout', operations[0], rollout),
          ('training', operations[1], training),
      ]
      return ', '.join(
          f'{side}: {operation} by {kernels.of(operation)}'
          for side, operation, kernels in sides
          if operation
      )
  return ''


def windows(model: ModelConfig) -> list[tuple[str, ...]]:
  """Returns the ops in windows of a few layers, which are tapped together."""
  found: dict[int, list[str]] = {}
  at = 0
  for op in ops(model):
    name = op.partition('/')[0]
    if name.startswith('layers_'):
      at = int(name.removeprefix('layers_')) // _LAYERS_AT_ONCE
    found.setdefault(at, []).append(op)
  return [tuple(window) for window in found.values()]


def is_head(op: str) -> bool:
  """Returns whether only the decode step has the op, and prefill does not."""
  return op in (LOGITS, LOGSUMEXP, LOGPROB)


def name_of(op: str) -> str:
  """Returns an op's name in `Compared`."""
  return op.removesuffix('/out')


def compare_op(
    op: str,
    ours: list[np.ndarray],
    theirs: list[np.ndarray],
    chosen: list[Placed],
) -> Compared:
  """Compares an op's values bit for bit.

  Args:
    op: its path.
    ours: the rollout's values per sequence, [tokens, width]; the head's values
      start at the last prompt token.
    theirs: the training forward's values, of the same shapes and dtypes.
    chosen: the sequences.
  """
  unequal, elements, largest, where = 0, 0, 0.0, ''
  for a, b, s in zip(ours, theirs, chosen, strict=True):
    assert a.shape == b.shape and a.dtype == b.dtype, (op, a.shape, b.shape)
    differs = bits(a) != bits(b)
    unequal, elements = unequal + int(differs.sum()), elements + differs.size
    if not differs.any():
      continue
    wide = np.abs(a.astype(np.float64) - b.astype(np.float64))
    largest = float(np.maximum(largest, wide[differs].max()))
    if not where:
      where = _where(op, int(np.argmax(differs.any(axis=1))), s.completion)
  return Compared(
      op=name_of(op),
      unequal=unequal,
      elements=elements,
      largest=largest,
      where=where,
  )


def _where(op: str, row: int, completion: Completion) -> str:
  """Returns the token and the rollout's program as text."""
  prompt = len(completion.prompt_tokens)
  name = f'prompt {completion.prompt_id}, sample {completion.sample}'
  at = row + prompt - 1 if is_head(op) else row
  program = 'prefill' if at < prompt - 1 else 'decode'
  return f'{name}, position {at} ({program})'
