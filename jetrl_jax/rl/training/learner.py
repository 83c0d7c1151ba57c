"""One scored rollout to the next state: all updates of a training step.

Old and reference log-probs are filled in, each mini-batch is accumulated over
its micro-batches and applied, and behind the last one the scales of inputs move
and the rollout of a mixed flow follows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.core.typing import Array, NpArray, PyTree
from jetrl_jax.metrics.timer import Timer
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.optim.apply import Gradients, UpdateInfo
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl import mismatch, packing
from jetrl_jax.rl.packing import Packed, Sequence
from jetrl_jax.rl.run import gradients as train_step
from jetrl_jax.rl.run import mixed_flow
from jetrl_jax.rl.run.gradients import UpdatePrograms
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.scoring import experience, kl_reward
from jetrl_jax.rl.scoring.experience import Experience


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateResult:
  """What a step's updates tell, for its metrics.

  Attributes:
    experience: what was learnt from: `learn`'s, its rewards and advantages
      less the KL penalty if the reward has one.
    infos: one per optimiser step.
    scored: completion's index -> the training forward's log-probs of prompt
      and response, at the weights that sampled it; of the first mini-batch
      alone with measure_mismatch='first'.
    packing_efficiency: mean share of the micro-batches' tokens that are real.
    rollout_changed: of a mixed flow: share of the rollout's 8-bit weight bytes
      that changed, nested like its slots; empty if it was not requantised.
    update_k3: nats, KL of the policy before the step's first update to the one
      after it, see `Learner._k3`; None where no token was sampled.
    rollout_update_k3: of a mixed flow: the same for the rollout's policy,
      before and after it follows all of the step's updates; None otherwise.
  """

  experience: Experience
  infos: list[UpdateInfo]
  scored: dict[int, np.ndarray]
  packing_efficiency: float
  rollout_changed: PyTree
  update_k3: float | None
  rollout_update_k3: float | None


class Learner:
  """Updates states of one shape under one precision.

  Args:
    spec: what the run is made of.
    loss: the objective of a micro-batch, see `UpdatePrograms`.
    state: an example, for its shapes.
    reference: what a KL term holds the policy to; None without one.
    timer: gets the phases' seconds.
  """

  def __init__(
      self,
      spec: RunSpec,
      loss: Any,
      state: TrainState,
      reference: PolicyParams | None,
      timer: Timer,
  ):
    self.spec = spec
    self.reference = reference
    self._timer = timer
    self._train_step = UpdatePrograms(
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
      self._score_rollout = train_step.compile_score(
          spec.rollout_policy, spec.mesh, mixed_flow.as_rollout(state)
      )

  def learn(
      self, state: TrainState, exp: Experience
  ) -> tuple[TrainState, UpdateResult]:
    """Updates on one scored rollout; a function of its arguments alone.

    Args:
      state: the state whose weights sampled `exp`; donated.
      exp: a rollout, fresh or read back by `replay.load_experience`.
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
      batches, scored = self._log_probs_at_rollout_weights(batches, params)
    if self.reference is not None:
      with timer('ref'):
        batches = [
            _with_field(
                batch, 'ref_logprobs', self.score(batch, self.reference)
            )
            for batch in batches
        ]
    if self.spec.algorithm.kl_reward_coef:
      with timer('adv'):
        exp, batches = kl_reward.subtract(exp, batches, self.spec.algorithm)
    with timer('update_actor'):
      state, updated = self._update(state, batches, scored)
    with timer('update_weights'):
      rolled = self._train_step.roll_inputs(state.fp8_state)
      state = dataclasses.replace(state, fp8_state=rolled)
      state, changed, k3 = self._requantize_rollout(
          state, batches, updated.infos
      )
    return state, UpdateResult(
        experience=exp,
        infos=updated.infos,
        scored=scored | updated.first,
        packing_efficiency=float(np.mean(updated.efficiency)),
        rollout_changed=changed,
        update_k3=updated.k3,
        rollout_update_k3=k3,
    )

  def score(
      self, batch: list[Sequence], params: PolicyParams
  ) -> list[np.ndarray]:
    """Returns the training forward's log-probs of each sequence, in nats."""
    return self._score(self._train_step.score, batch, params)

  def _score(
      self, score: Any, batch: list[Sequence], params: PolicyParams
  ) -> list[np.ndarray]:
    packed = self.spec.pack(batch)
    temperature = jnp.float32(self.spec.run.temperature)
    values = [score(params, micro, temperature)[0] for micro in packed.batches]
    return packing.unpack(values, packed)

  def score_in_update(
      self, batch: list[Sequence], state: TrainState
  ) -> list[np.ndarray]:
    """Returns `score`'s log-probs as the update computes them; learns nothing.

    In a run that is exact they are the same bits.
    """
    packed = self.spec.pack(batch)
    _, values = self._accumulate(state, packed)
    return packing.unpack(values, packed)

  def _accumulate(
      self, state: TrainState, packed: Packed
  ) -> tuple[Gradients, list[Array]]:
    """Returns the gradients of a mini-batch and its log-probs [B, T]."""
    # Made here, gone with `apply`: of a 7B they are 28 GiB, which a rollout's
    # keys and values may have.
    gradients = self._train_step.zero_gradients(state)
    temperature, values = jnp.float32(self.spec.run.temperature), []
    for micro in packed.batches:
      gradients, logprobs, _ = self._train_step.accumulate(
          state, gradients, micro, temperature
      )
      values.append(logprobs)
    return gradients, values

  def _log_probs_at_rollout_weights(
      self, batches: list[list[Sequence]], params: PolicyParams
  ) -> tuple[list[list[Sequence]], dict[int, np.ndarray]]:
    """Scores what `accumulate` will not meet at the rollout's weights.

    The first mini-batch of the first epoch is compared with what `accumulate`
    itself returns; the later ones with `score`, before any update, unless
    measure_mismatch='first' leaves them out. With old_logprobs='recompute' all
    are scored, and that becomes pi_old.

    Returns:
      (batches with old log-probs filled in,
       origin -> training forward's log-probs at the rollout's weights).
    """
    recompute = self.spec.algorithm.old_logprobs == 'recompute'
    later = self.spec.run.measure_mismatch == 'all'
    filled, scored = [], {}
    for i, batch in enumerate(batches):
      if recompute or (later and i > 0):
        values = self.score(batch, params)
        scored |= _by_origin(batch, values)
        if recompute:
          batch = _with_field(batch, 'old_logprobs', values)
      filled.append(batch)
    return filled, scored

  def _update(
      self,
      state: TrainState,
      batches: list[list[Sequence]],
      scored: dict[int, np.ndarray],
  ) -> tuple[TrainState, '_Updated']:
    """Takes every optimiser step of the rollout.

    The distance that the first update moves the policy comes with the second
    one's forward pass. Where there is only one update, a few answers are scored
    once more.

    Args:
      state: donated.
      batches: one per optimiser step of an epoch.
      scored: origin -> log-probs at the rollout's weights, as far as known.
    """
    done = _Updated()
    for epoch in range(self.spec.algorithm.ppo_epochs):
      for i, batch in enumerate(batches):
        packed = self.spec.pack(batch)
        done.efficiency.append(packed.efficiency)
        gradients, outputs = self._accumulate(state, packed)
        if len(done.infos) < 2:
          values = packing.unpack(outputs, packed)
          if epoch == i == 0:
            done.first = _by_origin(batch, values)
          else:
            done.k3 = self._k3(batch, scored | done.first, values)
        state, info = self._train_step.apply(state, gradients)
        done.infos.append(jax.device_get(info))
    if len(done.infos) == 1:
      few = self._few(batches[0])
      params = PolicyParams(state.weights, state.fp8_state)
      done.k3 = self._k3(few, done.first, self.score(few, params))
    return state, done

  def _few(self, batch: list[Sequence]) -> list[Sequence]:
    """Returns evenly spaced answers that fit into one micro-batch."""
    return batch[:: -(-len(batch) // self.spec.run.micro_batch_size)]

  def _k3(
      self,
      batch: list[Sequence],
      before: dict[int, np.ndarray],
      after: list[np.ndarray],
  ) -> float | None:
    """Returns the KL of the policy before an update to the one after it.

    Args:
      batch: answers of the policy before.
      before: origin -> its log-probs; the rollout's own are taken for others.
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
  ) -> tuple[TrainState, Any, float | None]:
    """Lets the rollout of a mixed flow follow the masters, if they moved.

    Returns:
      (state, share of bytes that changed, KL of the rollout's policy before to
       that after).
    """
    if self._requantizer is None or not any(info.applied for info in infos):
      return state, {}, None
    sequences = [sequence for batch in batches for sequence in batch]
    state, changed = self._requantizer(state, self.spec.pack(sequences).batches)
    few = self._few(sequences)
    params = mixed_flow.rollout_params(state)
    after = self._score(self._score_rollout, few, params)
    return state, changed, self._k3(few, {}, after)


@dataclasses.dataclass
class _Updated:
  """What the optimiser steps of one rollout leave beside the state.

  Attributes:
    infos: one per optimiser step.
    first: origin -> log-probs of the very first mini-batch.
    efficiency: per optimiser step the share of the micro-batches' tokens that
      are real.
    k3: nats, see `UpdateResult.update_k3`.
  """

  infos: list[UpdateInfo] = dataclasses.field(default_factory=list)
  first: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
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
