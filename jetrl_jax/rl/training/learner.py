"""Turns one rewarded rollout into the next state: the second half of a step.

compute old and reference log-probs (where the objective needs them)
for each epoch, for each mini-batch:
    for each micro-batch: accumulate gradients (forward and backward)
    apply: clip, AdamW, quantise the new weights once
after the last mini-batch: the input scales move, and the rollout's weights
of a mixed flow are quantised again
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.core import processes, sharding
from jetrl_jax.core.compile_ahead import CompileAhead, Program
from jetrl_jax.core.typing import Array, NpArray, PyTree
from jetrl_jax.metrics.timer import Timer
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.optim.apply import Gradients, UpdateInfo
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl import mismatch, packing
from jetrl_jax.rl.objective import LossFunction
from jetrl_jax.rl.packing import Packed, Sequence
from jetrl_jax.rl.run import mixed_flow
from jetrl_jax.rl.run.gradients import UpdatePrograms, compile_logprobs
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.scoring import experience, kl_reward
from jetrl_jax.rl.scoring.experience import Experience
from jetrl_jax.rl.types import TrainBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateResult:
  """What the metrics need to know about a step's updates.

  Attributes:
    experience: the rollout that was learnt from. With a KL penalty in the
      reward, the penalty is already subtracted from rewards and advantages.
    infos: one per optimiser step.
    train_logprobs: completion's index -> the training forward's log-probs of
      prompt and response, at the weights that sampled it. With
      measure_mismatch='first' only for the first mini-batch, unless
      old_logprobs='recompute'.
    packing_efficiency: mean share of the micro-batches' tokens that are real.
    rollout_changed: share of the rollout's 8-bit weight bytes that changed,
      nested like its scaling state; only in a mixed flow, and empty if the
      rollout's weights were not quantised again.
    update_k3: nats, KL from the policy before the step's first update to the
      policy after it, see `Learner._k3`; None if no token was sampled.
    rollout_update_k3: nats, the same KL for the rollout's policy of a mixed
      flow, over all updates of the step; None in a unified flow.
  """

  experience: Experience
  infos: list[UpdateInfo]
  train_logprobs: dict[int, np.ndarray]
  packing_efficiency: float
  rollout_changed: PyTree
  update_k3: float | None
  rollout_update_k3: float | None


class Learner:
  """Updates states of one shape in one precision.

  Args:
    spec: the run's specification.
    loss: the objective of a micro-batch, see `UpdatePrograms`.
    state: an example, for its shapes.
    timer: records the seconds of each phase.
    reference: the reference policy of a KL term; None without one, or until it
      is set.
  """

  def __init__(
      self,
      spec: RunSpec,
      loss: LossFunction,
      state: TrainState,
      timer: Timer,
      reference: PolicyParams | None = None,
  ):
    self.spec = spec
    self.reference = reference
    self._timer = timer
    self._programs = UpdatePrograms(
        spec.policy,
        loss,
        spec.optimizer.build(),
        spec.optimizer,
        spec.mesh,
        state,
    )
    self._requantizer: mixed_flow.Requantizer | None = None
    if spec.is_mixed:
      self._requantizer = mixed_flow.Requantizer(
          spec.rollout_policy, spec.mesh, state
      )
      self._rollout_logprobs = compile_logprobs(
          spec.rollout_policy, spec.mesh, mixed_flow.as_rollout(state)
      )

  def compile_ahead(self, ahead: CompileAhead, state: TrainState) -> None:
    """Compiles what a step calls, on other threads.

    Args:
      ahead: the threads.
      state: arrays, or shapes with their shardings.
    """
    spec, run = self.spec, self.spec.run
    batches = run.train_batch_size // run.mini_batch_size
    updates = spec.algorithm.ppo_epochs * batches
    self._programs.compile_ahead(
        ahead,
        state,
        [
            TrainBatch.of_shapes(*shape)
            for shape in (spec.batch_shape, *spec.smaller_batch_shapes)
        ],
        # A single update is followed by a forward pass, see `_update`.
        logprobs=updates == 1
        or spec.needs_reference
        or spec.algorithm.old_logprobs == 'recompute'
        or run.measure_mismatch == 'all',
    )

  def learn(
      self, state: TrainState, exp: Experience
  ) -> tuple[TrainState, UpdateResult]:
    """Takes all updates on one rollout; a function of its arguments only.

    Args:
      state: the state whose weights sampled `exp`; donated.
      exp: a rewarded rollout.

    Returns:
      (the next state, what the metrics need to know).
    """
    timer, params = self._timer, PolicyParams(state.weights, state.fp8_state)
    with timer('adv'):
      batches = experience.mini_batches(
          exp,
          self.spec.algorithm,
          mini_batch_size=self.spec.run.mini_batch_size,
          max_response_length=self.spec.engine.max_response_length,
      )
    with timer('old_log_prob'):
      batches, known = self._logprobs_at_rollout_weights(batches, params)
    if self.reference is not None:
      with timer('ref'):
        batches = [
            _with_field(
                batch, 'ref_logprobs', self.logprobs(batch, self.reference)
            )
            for batch in batches
        ]
    if self.spec.algorithm.kl_reward_coef:
      with timer('adv'):
        exp, batches = kl_reward.subtract(exp, batches, self.spec.algorithm)
    with timer('update_actor'):
      state, updated = self._update(state, batches, known)
    with timer('update_weights'):
      rolled = self._programs.roll_inputs(state.fp8_state)
      state = dataclasses.replace(state, fp8_state=rolled)
      state, changed, k3 = self._requantize_rollout(
          state, batches, updated.infos
      )
    return state, UpdateResult(
        experience=exp,
        infos=updated.infos,
        train_logprobs=known | updated.first_logprobs,
        packing_efficiency=float(np.mean(updated.efficiency)),
        rollout_changed=changed,
        update_k3=updated.k3,
        rollout_update_k3=k3,
    )

  def logprobs(
      self, batch: list[Sequence], params: PolicyParams
  ) -> list[np.ndarray]:
    """Returns the training forward's log-probs of each sequence, in nats."""
    return self._packed_logprobs(self._programs.logprobs, batch, params)

  def _pack(self, batch: list[Sequence]) -> Packed:
    return self.spec.pack(batch, self.spec.smaller_batch_shapes)

  def _packed_logprobs(
      self,
      compute: Program,
      batch: list[Sequence],
      params: PolicyParams,
  ) -> list[np.ndarray]:
    packed = self._pack(batch)
    temperature = jnp.float32(self.spec.run.temperature)
    values = [
        compute(params, micro, temperature)[0] for micro in packed.batches
    ]
    return packing.unpack(values, packed)

  def logprobs_in_update(
      self, batch: list[Sequence], state: TrainState
  ) -> list[np.ndarray]:
    """Returns the log-probs that the update itself computes; updates nothing.

    In an exact run they are the same bits as those of `logprobs`.
    """
    packed = self._pack(batch)
    _, values = self._accumulate(state, packed)
    return packing.unpack(values, packed)

  def _accumulate(
      self, state: TrainState, packed: Packed
  ) -> tuple[Gradients, list[Array]]:
    """Returns (gradients of a mini-batch, log-probs [B, T] per micro-batch)."""
    # The accumulator lives from here to `apply` only. For a 7B model it takes
    # 28 GiB, which the rollout's KV cache uses the rest of the time.
    gradients = self._programs.zero_gradients(state)
    temperature, values = jnp.float32(self.spec.run.temperature), []
    for micro in packed.batches:
      gradients, logprobs, _ = self._programs.accumulate(
          state, gradients, micro, temperature
      )
      values.append(logprobs)
      processes.touch()
    return gradients, values

  def _logprobs_at_rollout_weights(
      self, batches: list[list[Sequence]], params: PolicyParams
  ) -> tuple[list[list[Sequence]], dict[int, np.ndarray]]:
    """Computes training log-probs at the weights that sampled the rollout.

    `accumulate` computes those of the first mini-batch itself, because no
    update comes before it. The later mini-batches need a forward of their own
    here, unless measure_mismatch='first' leaves them out. With
    old_logprobs='recompute' all mini-batches get one, and it becomes pi_old.

    Returns:
      (batches with old log-probs filled in,
       origin -> the training forward's log-probs at the rollout's weights).
    """
    recompute = self.spec.algorithm.old_logprobs == 'recompute'
    later = self.spec.run.measure_mismatch == 'all'
    filled, known = [], {}
    for i, batch in enumerate(batches):
      if recompute or (later and i > 0):
        values = self.logprobs(batch, params)
        known |= _by_origin(batch, values)
        if recompute:
          batch = _with_field(batch, 'old_logprobs', values)
      filled.append(batch)
    return filled, known

  def _update(
      self,
      state: TrainState,
      batches: list[list[Sequence]],
      known: dict[int, np.ndarray],
  ) -> tuple[TrainState, '_Updated']:
    """Takes every optimiser step on the rollout.

    The second update's forward pass shows how far the first update moved the
    policy. If there is only one update, one more forward pass over a few
    sequences shows it.

    Args:
      state: donated.
      batches: one per optimiser step of an epoch.
      known: origin -> log-probs at the rollout's weights; may lack sequences.
    """
    done = _Updated()
    for epoch in range(self.spec.algorithm.ppo_epochs):
      for i, batch in enumerate(batches):
        packed = self._pack(batch)
        done.efficiency.append(packed.efficiency)
        gradients, outputs = self._accumulate(state, packed)
        if len(done.infos) < 2:
          values = packing.unpack(outputs, packed)
          if epoch == i == 0:
            done.first_logprobs = _by_origin(batch, values)
          else:
            done.k3 = self._k3(batch, known | done.first_logprobs, values)
        state, info = self._programs.apply(state, gradients)
        changed = sharding.fetch(info.changed_bytes)
        info = jax.device_get(dataclasses.replace(info, changed_bytes={}))
        done.infos.append(dataclasses.replace(info, changed_bytes=changed))
    if len(done.infos) == 1:
      few = self._few(batches[0])
      params = PolicyParams(state.weights, state.fp8_state)
      done.k3 = self._k3(few, done.first_logprobs, self.logprobs(few, params))
    return state, done

  def _few(self, batch: list[Sequence]) -> list[Sequence]:
    """Returns evenly spaced sequences that fit into one micro-batch."""
    return batch[:: -(-len(batch) // self.spec.run.micro_batch_size)]

  def _k3(
      self,
      batch: list[Sequence],
      before: dict[int, np.ndarray],
      after: list[np.ndarray],
  ) -> float | None:
    """Returns the KL from the policy before an update to the one after it.

    Args:
      batch: sequences that the policy before the update sampled.
      before: origin -> log-probs before the update; for sequences that are not
        in it, the rollout's own log-probs are used.
      after: log-probs after the update.
    """

    def sampled(values: list[NpArray]) -> NpArray:
      chosen = [
          value[sequence.loss_mask > 0]
          for value, sequence in zip(values, batch, strict=True)
      ]
      return np.concatenate(chosen)

    known = [before.get(s.origin, s.rollout_logprobs) for s in batch]
    return mismatch.k3_divergence(sampled(known), sampled(after))

  def _requantize_rollout(
      self,
      state: TrainState,
      batches: list[list[Sequence]],
      infos: list[UpdateInfo],
  ) -> tuple[TrainState, PyTree, float | None]:
    """Quantises the rollout's weights of a mixed flow, if the masters moved.

    Returns:
      (state, share of bytes that changed, KL from the rollout's old policy to
       its new one).
    """
    if self._requantizer is None or not any(info.applied for info in infos):
      return state, {}, None
    sequences = [sequence for batch in batches for sequence in batch]
    state, changed = self._requantizer(state, self.spec.pack(sequences).batches)
    few = self._few(sequences)
    params = mixed_flow.rollout_params(state)
    after = self._packed_logprobs(self._rollout_logprobs, few, params)
    return state, changed, self._k3(few, {}, after)


@dataclasses.dataclass
class _Updated:
  """What the optimiser steps on one rollout return, less the state.

  Attributes:
    infos: one per optimiser step.
    first_logprobs: origin -> log-probs of the first mini-batch in epoch 0.
    efficiency: per optimiser step, the share of the micro-batches' tokens that
      are real.
    k3: nats, see `UpdateResult.update_k3`.
  """

  infos: list[UpdateInfo] = dataclasses.field(default_factory=list)
  first_logprobs: dict[int, np.ndarray] = dataclasses.field(
      default_factory=dict
  )
  efficiency: list[float] = dataclasses.field(default_factory=list)
  k3: float | None = None


def _by_origin(
    batch: list[Sequence], values: list[NpArray]
) -> dict[int, np.ndarray]:
  return {s.origin: value for s, value in zip(batch, values, strict=True)}


def _with_field(
    batch: list[Sequence], name: str, values: list[NpArray]
) -> list[Sequence]:
  return [
      dataclasses.replace(sequence, **{name: value})
      for sequence, value in zip(batch, values, strict=True)
  ]
