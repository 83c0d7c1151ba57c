"""Where rollout and training first differ: layer and op, bit for bit.

The same tokens go through prefill and decode, and through the forward inside
the update's program, once more with values on the way among the outputs. These
are compared at every token that both sides compute, in the forward's order.

Taps can change a program. So the log-probs of the tapped programs are compared
with those of the run's own. Where they differ, the ops are looked at one by
one, each in programs of its own, which disturbs least; what still differs is
said.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jetrl_jax import rng, sharding
from jetrl_jax.mismatch_start import Start
from jetrl_jax.mismatch_taps import (
    LOGITS,
    LOGSUMEXP,
    TappedEngine,
    tapped,
    tapped_update,
)
from jetrl_jax.models.types import ModelConfig
from jetrl_jax.rl import experience, forced_decode, mixed_flow
from jetrl_jax.rl.decode_step import EngineConfig
from jetrl_jax.rl.objective import policy_loss
from jetrl_jax.rl.packing import Placement
from jetrl_jax.rl.policy import Policy, PolicyParams
from jetrl_jax.rl.types import Completion, TrainBatch, TrainState

_LAYERS_AT_ONCE = 4
# Sequences that are decoded again, and whose values come to the host.
_SEQUENCES = 16
_OPS = (
    'attn_norm/out',
    'attn/qkv/out',
    'attn/q_norm/out',
    'attn/k_norm/out',
    'attn/rope_q',
    'attn/rope_k',
    'attn/attention',
    'attn/o/out',
    'attn_sum',
    'mlp_norm/out',
    'mlp/gate_up/out',
    'mlp/swiglu',
    'mlp/down/out',
    'mlp_sum',
)
LOGPROB = 'logprob'

# Op to one array [tokens, width] per sequence.
_Values = dict[str, list[np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
  """A response, and where the training forward has it.

  Attributes:
    completion: with the rollout's log-probs.
    place: in the micro-batch.
    trained: float32 [prompt + response], nats: the training forward's.
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
  """One op on both sides.

  Attributes:
    op: its path, or 'logits', 'logsumexp', 'logprob'.
    unequal: elements that differ in any bit.
    elements: elements compared.
    largest: largest difference, in the op's own unit.
    where: the first token that differs, in words; '' without any.
  """

  op: str
  unequal: int
  elements: int
  largest: float
  where: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
  """What a bisection found.

  Attributes:
    rows: in the order of the forward, to the window of the first difference.
    tokens: response tokens of the sequences that were looked at.
    sequences: how many sequences these are.
    disturbed: tokens whose log-prob changed with the taps (rollout, training).
    one_by_one: whether each op was looked at in programs of its own.
  """

  rows: list[Compared]
  tokens: int
  sequences: int
  disturbed: tuple[int, int]
  one_by_one: bool

  @property
  def first(self) -> Compared | None:
    """The first op that differs; None where all agree."""
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
  head = ['final_norm/out', LOGITS, LOGSUMEXP, LOGPROB]
  return ['embed/out', *layers, *head]


def windows(model: ModelConfig) -> list[tuple[str, ...]]:
  """Returns the ops in runs of a few layers, which are tapped together."""
  found: dict[int, list[str]] = {}
  at = 0
  for op in ops(model):
    name = op.partition('/')[0]
    if name.startswith('layers_'):
      at = int(name.removeprefix('layers_')) // _LAYERS_AT_ONCE
    found.setdefault(at, []).append(op)
  return [tuple(window) for window in found.values()]


def bisect(start: Start) -> Found:
  """Takes the rollout of the run's next step, and bisects its mismatch.

  Args:
    start: its state is only read.
  """
  parts, state = start.parts, start.state
  exp = start.collector.collect(start.step, state).experience
  cases: list[tuple[TrainBatch, list[Placed]]] = []
  for batch in experience.mini_batches(
      exp,
      parts.algorithm,
      mini_batch_size=parts.run.mini_batch_size,
      max_response_length=parts.engine.max_response_length,
  ):
    packed, scored = parts.pack(batch), start.learner.score_in_update(
        batch, state
    )
    for i, micro in enumerate(packed.batches):
      placed = [
          Placed(completion=exp.completions[p.origin], place=p, trained=values)
          for p, values in zip(packed.placements, scored, strict=True)
          if p.batch == i
      ]
      cases.append((micro, placed))
  # The first micro-batch with a difference, if there is one.
  micro, placed = min(cases, key=lambda case: all(s.agrees for s in case[1]))
  bisector = Bisector(
      parts.policy,
      parts.rollout_policy,
      parts.engine,
      functools.partial(policy_loss, parts.loss),
      parts.mesh,
      state,
  )
  params = mixed_flow.rollout_params(state)
  return bisector.find(state, params, micro, placed, parts.run.temperature)


class Bisector:
  """Compiles the tapped programs of one run; they are used again.

  Args:
    policy: training's.
    rollout_policy: the rollout's.
    config: of the rollout's engine.
    loss: the objective, see `TrainStep`.
    mesh: devices.
    state: an example, for its shapes.
  """

  def __init__(
      self,
      policy: Policy,
      rollout_policy: Policy,
      config: EngineConfig,
      loss: Any,
      mesh: Mesh,
      state: TrainState,
  ):
    self._policy, self._rollout_policy = policy, rollout_policy
    self._config, self._loss, self._mesh = config, loss, mesh
    self._specs = sharding.tree_specs(state, mesh)
    self._compiled: dict[tuple[str, ...], tuple[TappedEngine, Any]] = {}

  def find(
      self,
      state: TrainState,
      rollout_params: PolicyParams,
      batch: TrainBatch,
      sequences: list[Placed],
      temperature: float,
  ) -> Found:
    """Compares op after op until one differs.

    Args:
      state: what training reads.
      rollout_params: what the rollout reads.
      batch: one micro-batch.
      sequences: those that lie in it.
      temperature: of both sides.
    """
    chosen = sorted(sequences, key=lambda s: (s.agrees, s.first_unequal))
    chosen = chosen[: min(_SEQUENCES, self._config.num_slots)]
    rows, disturbed = [], (0, 0)
    arguments = (state, rollout_params, batch, chosen, temperature)
    one_by_one = False
    for window in windows(self._policy.model):
      found, changed = self._compare(window, *arguments)
      if any(changed) and len(window) > 1:
        one_by_one, found, changed = True, [], (0, 0)
        for op in window:
          some, one = self._compare((op,), *arguments)
          found += some
          changed = (max(changed[0], one[0]), max(changed[1], one[1]))
          if some[0].unequal:
            break
      rows += found
      disturbed = (
          max(disturbed[0], changed[0]),
          max(disturbed[1], changed[1]),
      )
      if any(row.unequal for row in found):
        break
    return Found(
        rows=rows,
        tokens=sum(len(s.completion.tokens) for s in chosen),
        sequences=len(chosen),
        disturbed=disturbed,
        one_by_one=one_by_one,
    )

  def _compare(
      self,
      wanted: tuple[str, ...],
      state: TrainState,
      rollout_params: PolicyParams,
      batch: TrainBatch,
      chosen: list[Placed],
      temperature: float,
  ) -> tuple[list[Compared], tuple[int, int]]:
    engine, update = self._programs(wanted)
    ours = _decoded(engine, rollout_params, chosen, temperature)
    theirs = _trained(update, state, batch, chosen, temperature)
    disturbed = (
        _unequal(ours[LOGPROB], [s.completion.logprobs for s in chosen]),
        _unequal(theirs[LOGPROB], [s.theirs for s in chosen]),
    )
    return [
        compare_op(op, ours[op], theirs[op], chosen) for op in wanted
    ], disturbed

  def _programs(self, wanted: tuple[str, ...]) -> tuple[TappedEngine, Any]:
    if wanted not in self._compiled:
      policy = tapped(self._policy, wanted)
      specs, rows = self._specs, sharding.ROWS

      def update(state, batch, temperature):
        return tapped_update(policy, self._loss, state, batch, temperature)

      run = sharding.per_device(
          update,
          self._mesh,
          (specs, rows, P()),
          ((specs.trainable, specs.fp8_state), rows, rows),
      )
      engine = TappedEngine(
          tapped(self._rollout_policy, wanted), self._config, self._mesh
      )
      self._compiled[wanted] = engine, policy.jit(run)
    return self._compiled[wanted]


def _decoded(
    engine: TappedEngine,
    params: PolicyParams,
    chosen: list[Placed],
    temperature: float,
) -> _Values:
  """Returns what prefill and decode compute on the way."""
  completions = [s.completion for s in chosen]
  engine.seen.clear()
  state = forced_decode.begin(
      engine, params, completions, temperature=temperature
  )
  found = _of_prefill(engine, completions)
  while np.any(jax.device_get(state.active)):
    before = jax.device_get(state.emitted)
    state = engine.generate_block(params, state, rng.key(0, rng.ROLLOUT, 0), 1)
    # A parked sequence takes no step.
    ran = jax.device_get(state.emitted) > before
    for op, rows in jax.device_get(engine.seen[-1]).items():
      for i in np.flatnonzero(ran[: len(chosen)]):
        found.setdefault(op, [[] for _ in chosen])[i].append(rows[i : i + 1])
    engine.seen.clear()
  logprobs = jax.device_get(state.logprobs)
  return {
      op: [np.concatenate(parts) for parts in values]
      for op, values in found.items()
  } | {
      LOGPROB: [
          logprobs[i, : len(c.tokens), None] for i, c in enumerate(completions)
      ]
  }


def _of_prefill(
    engine: TappedEngine, completions: list[Completion]
) -> dict[str, list[list[np.ndarray]]]:
  """Takes the rows of each prompt out of what the prefills left."""
  found: dict[str, list[list[np.ndarray]]] = {}
  devices = engine.policy.axes.size
  rows = -(-forced_decode.PREFILL_ROWS // devices) * devices
  seen = jax.device_get(engine.seen)
  # As `forced_decode.begin` groups them.
  prompts = list(dict.fromkeys(c.prompt_id for c in completions))
  for i, completion in enumerate(completions):
    call, row = divmod(
        prompts.index(completion.prompt_id), forced_decode.PREFILL_ROWS
    )
    for op, value in seen[call].items():
      bucket = value.shape[0] // rows
      # The last prompt token is fed by the first decode step.
      stop = row * bucket + len(completion.prompt_tokens) - 1
      lists = found.setdefault(op, [[] for _ in completions])
      lists[i].append(value[row * bucket : stop])
  return found


def _trained(
    update: Any,
    state: TrainState,
    batch: TrainBatch,
    chosen: list[Placed],
    temperature: float,
) -> _Values:
  """Returns what the update's forward computes on the way."""
  _, logprobs_BT, taps = update(state, batch, jnp.float32(temperature))
  length = batch.tokens.shape[1]
  starts = [s.place.row * length + s.place.start for s in chosen]
  # Nothing was fed the last token. Of a large micro-batch only these rows come
  # to the host.
  index = [
      np.arange(start, start + s.place.length - 1)
      for start, s in zip(starts, chosen, strict=True)
  ]
  ends = np.cumsum([len(rows) for rows in index])[:-1]
  taken = jax.device_get(_take(taps, np.concatenate(index)))
  found = {op: np.split(rows, ends) for op, rows in taken.items()}
  logprobs = np.asarray(logprobs_BT).reshape(-1, 1)
  found[LOGPROB] = [logprobs[rows + 1] for rows in index]
  for op in found:
    if _is_head(op):
      found[op] = [
          rows[len(s.completion.prompt_tokens) - 1 :]
          for rows, s in zip(found[op], chosen, strict=True)
      ]
  return found


@jax.jit
def _take(taps, index):
  return jax.tree.map(lambda x: x[index], taps)


def _is_head(op: str) -> bool:
  """Whether only the decode step has it, and prefill has not."""
  return op in (LOGITS, LOGSUMEXP, LOGPROB)


def _unequal(ours: list[np.ndarray], theirs: list[np.ndarray]) -> int:
  pairs = zip(ours, theirs, strict=True)
  return sum(int(np.sum(bits(a.ravel()) != bits(b))) for a, b in pairs)


def compare_op(
    op: str,
    ours: list[np.ndarray],
    theirs: list[np.ndarray],
    chosen: list[Placed],
) -> Compared:
  """Compares an op's values bit for bit.

  Args:
    op: its path.
    ours: the rollout's values per sequence, [tokens, width]; of the head from
      the last prompt token on.
    theirs: the training forward's, of the same shapes and dtypes.
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
      op=op.removesuffix('/out'),
      unequal=unequal,
      elements=elements,
      largest=largest,
      where=where,
  )


def _where(op: str, row: int, completion: Completion) -> str:
  """Says at which token, and in which of the rollout's programs."""
  prompt = len(completion.prompt_tokens)
  name = f'prompt {completion.prompt_id}, sample {completion.sample}'
  at = row + prompt - 1 if _is_head(op) else row
  program = 'prefill' if at < prompt - 1 else 'decode'
  return f'{name}, position {at} ({program})'
