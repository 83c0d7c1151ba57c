"""Finds the first layer and op in which rollout and training differ in a bit.

The same tokens go through prefill and decode, and through the forward inside
the update's program, again with intermediate values as outputs (taps). These
are compared at every token that both sides compute, in the forward's order.

Taps can change a program. So the log-probs of the tapped programs are compared
with those of the run's own programs. If they differ, each op is tapped in
programs of its own, which changes them least. The result reports any difference
that remains.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jetrl_jax.core import rng, sharding
from jetrl_jax.mismatch import forced_decode
from jetrl_jax.mismatch.compare import (
    LOGPROB,
    Compared,
    Found,
    Placed,
    bits,
    compare_op,
    is_head,
    name_of,
    windows,
)
from jetrl_jax.mismatch.start import Start
from jetrl_jax.mismatch.taps import TappedEngine, tapped, tapped_update
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.objective import LossFunction, policy_loss
from jetrl_jax.rl.rollout.buckets import PREFILL_ROWS
from jetrl_jax.rl.rollout.decode_state import EngineConfig
from jetrl_jax.rl.run import mixed_flow
from jetrl_jax.rl.scoring import experience
from jetrl_jax.rl.types import Completion, TrainBatch

# Sequences that are decoded again, and whose values come to the host.
_SEQUENCES = 16

# Op to one array [tokens, width] per sequence.
_Values = dict[str, list[np.ndarray]]


def bisect(start: Start) -> Found:
  """Samples the rollout of the run's next step and bisects its mismatch.

  Args:
    start: its state is only read.
  """
  spec, state = start.spec, start.state
  exp = start.rollout()
  cases: list[tuple[TrainBatch, list[Placed]]] = []
  for batch in experience.mini_batches(
      exp,
      spec.algorithm,
      mini_batch_size=spec.run.mini_batch_size,
      max_response_length=spec.engine.max_response_length,
  ):
    packed = spec.pack(batch, spec.smaller_batch_shapes)
    scored = start.learner.logprobs_in_update(batch, state)
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
      spec.policy,
      spec.rollout_policy,
      spec.engine,
      functools.partial(policy_loss, spec.loss),
      spec.mesh,
      state,
  )
  params = mixed_flow.rollout_params(state)
  return bisector.find(state, params, micro, placed, spec.run.temperature)


class Bisector:
  """Compiles the tapped programs of one run and keeps them.

  Args:
    policy: training's policy.
    rollout_policy: the rollout's policy.
    config: the rollout engine's config.
    loss: the objective.
    mesh: devices.
    state: an example, for its shapes.
  """

  def __init__(
      self,
      policy: Policy,
      rollout_policy: Policy,
      config: EngineConfig,
      loss: LossFunction,
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
      state: the state that training reads.
      rollout_params: the params that the rollout reads.
      batch: one micro-batch.
      sequences: the sequences in it.
      temperature: the temperature of both sides.
    """
    chosen = sorted(sequences, key=lambda s: (s.agrees, s.first_unequal))
    chosen = chosen[: min(_SEQUENCES, self._config.num_slots)]
    rows, unseen, disturbed = [], [], (0, 0)
    arguments = (state, rollout_params, batch, chosen, temperature)
    one_by_one = False
    for window in windows(self._policy.model):
      found, changed = self._compare(window, *arguments)
      seen = {row.op for row in found}
      unseen += [
          op
          for op in window
          # Only some recipes have FP8 values before their dot.
          if name_of(op) not in seen and not op.endswith('_fp8')
      ]
      if any(changed) and len(window) > 1:
        one_by_one, found, changed = True, [], (0, 0)
        for op in window:
          if op in unseen:
            continue
          some, one = self._compare((op,), *arguments)
          found += some
          changed = _most(changed, one)
          if some and some[0].unequal:
            break
      rows += found
      disturbed = _most(disturbed, changed)
      if any(row.unequal for row in found):
        break
    return Found(
        rows=rows,
        tokens=sum(len(s.completion.tokens) for s in chosen),
        sequences=len(chosen),
        unseen=tuple(unseen),
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
        compare_op(op, ours[op], theirs[op], chosen)
        for op in wanted
        if op in ours and op in theirs
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
          ((specs.trainable, P()), rows, rows),
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
  """Returns the tapped values of prefill and decode."""
  completions = [s.completion for s in chosen]
  params = engine.replicate(params)
  engine.seen.clear()
  state = forced_decode.begin(
      engine, params, completions, temperature=temperature
  )
  found = _of_prefill(engine, completions)
  shown = set()
  while forced_decode.running(engine, state):
    before = jax.device_get(state.emitted)
    state = engine.generate_block(params, state, rng.key(0, rng.ROLLOUT, 0), 1)
    # A preempted sequence takes no step.
    ran = jax.device_get(state.emitted) > before
    shown |= {*engine.seen[-1]}
    for op, rows in jax.device_get(engine.seen[-1]).items():
      for i in np.flatnonzero(ran[: len(chosen)]):
        found.setdefault(op, [[] for _ in chosen])[i].append(rows[i : i + 1])
    engine.seen.clear()
  logprobs = jax.device_get(state.logprobs)
  return {
      op: [np.concatenate(spec) for spec in values]
      for op, values in found.items()
      # A kernel of decode may hide a value that prefill shows.
      if op in shown
  } | {
      LOGPROB: [
          logprobs[i, : len(c.tokens), None] for i, c in enumerate(completions)
      ]
  }


def _of_prefill(
    engine: TappedEngine, completions: list[Completion]
) -> dict[str, list[list[np.ndarray]]]:
  """Returns each prompt's rows of the prefills' taps."""
  found: dict[str, list[list[np.ndarray]]] = {}
  devices = engine.policy.axes.size
  rows = -(-PREFILL_ROWS // devices) * devices
  seen = jax.device_get(engine.seen)
  # `forced_decode.begin` groups prompts in the same way.
  prompts = list(dict.fromkeys(c.prompt_id for c in completions))
  for i, completion in enumerate(completions):
    call, row = divmod(prompts.index(completion.prompt_id), PREFILL_ROWS)
    for op, value in seen[call].items():
      bucket = value.shape[0] // rows
      # The first decode step feeds the last prompt token.
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
  """Returns the tapped values of the update's forward."""
  _, logprobs_BT, taps = update(state, batch, jnp.float32(temperature))
  length = batch.tokens.shape[1]
  starts = [s.place.row * length + s.place.start for s in chosen]
  # The rollout never feeds the last token. Only these rows are copied to the
  # host, because a micro-batch may be large.
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
    if is_head(op):
      found[op] = [
          rows[len(s.completion.prompt_tokens) - 1 :]
          for rows, s in zip(found[op], chosen, strict=True)
      ]
  return found


@jax.jit
def _take(taps, index):
  return jax.tree.map(lambda x: x[index], taps)


def _most(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
  return max(one[0], other[0]), max(one[1], other[1])


def _unequal(ours: list[np.ndarray], theirs: list[np.ndarray]) -> int:
  pairs = zip(ours, theirs, strict=True)
  return sum(int(np.sum(bits(a.ravel()) != bits(b))) for a, b in pairs)
