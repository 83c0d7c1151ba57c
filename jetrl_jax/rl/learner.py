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

from jetrl_jax.rl import experience, kl_reward, mixed_flow, packing
from jetrl_jax.rl.apply import Gradients, UpdateInfo
from jetrl_jax.rl.experience import Experience
from jetrl_jax.rl.packing import Packed, Sequence
from jetrl_jax.rl.parts import Parts
from jetrl_jax.rl.policy import PolicyParams
from jetrl_jax.rl.timer import Timer
from jetrl_jax.rl.train_step import TrainStep
from jetrl_jax.rl.types import TrainState
from jetrl_jax.typing import Array, NpArray, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learnt:
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
  """

  experience: Experience
  infos: list[UpdateInfo]
  scored: dict[int, np.ndarray]
  packing_efficiency: float
  rollout_changed: PyTree


class Learner:
  """Updates states of one shape under one precision.

  Args:
    parts: what the run is made of.
    loss: the objective of a micro-batch, see `TrainStep`.
    state: an example, for its shapes.
    reference: what a KL term holds the policy to; None without one.
    timer: gets the phases' seconds.
  """

  def __init__(
      self,
      parts: Parts,
      loss: Any,
      state: TrainState,
      reference: PolicyParams | None,
      timer: Timer,
  ):
    self.parts = parts
    self.reference = reference
    self._timer = timer
    self._train_step = TrainStep(
        parts.policy,
        loss,
        parts.optimizer.build(),
        parts.optimizer,
        parts.mesh,
        state,
    )
    self._requantizer: mixed_flow.Requantizer | None = None
    if parts.is_mixed:
      self._requantizer = mixed_flow.Requantizer(
          parts.rollout_policy, parts.mesh, state
      )

  def learn(
      self, state: TrainState, exp: Experience
  ) -> tuple[TrainState, Learnt]:
    """Updates on one scored rollout; a function of its arguments alone.

    Args:
      state: the state whose weights sampled `exp`; donated.
      exp: a rollout, fresh or read back by `replay.load_experience`.
    """
    timer, params = self._timer, PolicyParams(state.weights, state.fp8_state)
    with timer('adv'):
      batches = experience.mini_batches(
          exp,
          self.parts.algorithm,
          mini_batch_size=self.parts.run.mini_batch_size,
          max_response_length=self.parts.engine.max_response_length,
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
    if self.parts.algorithm.kl_reward_coef:
      with timer('adv'):
        exp, batches = kl_reward.subtract(exp, batches, self.parts.algorithm)
    with timer('update_actor'):
      state, infos, first, efficiency = self._update(state, batches)
    with timer('update_weights'):
      rolled = self._train_step.roll_inputs(state.fp8_state)
      state = dataclasses.replace(state, fp8_state=rolled)
      state, changed = self._requantize_rollout(state, batches, infos)
    return state, Learnt(
        experience=exp,
        infos=infos,
        scored=scored | first,
        packing_efficiency=efficiency,
        rollout_changed=changed,
    )

  def score(
      self, batch: list[Sequence], params: PolicyParams
  ) -> list[np.ndarray]:
    """Returns the training forward's log-probs of each sequence, in nats."""
    packed = self.parts.pack(batch)
    temperature = jnp.float32(self.parts.run.temperature)
    values = [
        self._train_step.score(params, micro, temperature)[0]
        for micro in packed.batches
    ]
    return packing.unpack(values, packed)

  def score_in_update(
      self, batch: list[Sequence], state: TrainState
  ) -> list[np.ndarray]:
    """Returns `score`'s log-probs as the update computes them; learns nothing.

    In a run that is exact they are the same bits.
    """
    packed = self.parts.pack(batch)
    _, values = self._accumulate(state, packed)
    return packing.unpack(values, packed)

  def _accumulate(
      self, state: TrainState, packed: Packed
  ) -> tuple[Gradients, list[Array]]:
    """Returns the gradients of a mini-batch and its log-probs [B, T]."""
    # Made here, gone with `apply`: of a 7B they are 28 GiB, which a rollout's
    # keys and values may have.
    gradients = self._train_step.zero_gradients(state)
    temperature, values = jnp.float32(self.parts.run.temperature), []
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
    recompute = self.parts.algorithm.old_logprobs == 'recompute'
    later = self.parts.run.measure_mismatch == 'all'
    filled, scored = [], {}
    for i, batch in enumerate(batches):
      if recompute or (later and i > 0):
        values = self.score(batch, params)
        scored |= {s.origin: v for s, v in zip(batch, values, strict=True)}
        if recompute:
          batch = _with_field(batch, 'old_logprobs', values)
      filled.append(batch)
    return filled, scored

  def _update(
      self, state: TrainState, batches: list[list[Sequence]]
  ) -> tuple[TrainState, list[UpdateInfo], dict[int, np.ndarray], float]:
    """Takes every optimiser step of the rollout.

    Returns:
      (state, one UpdateInfo per optimiser step,
       origin -> log-probs of the very first mini-batch,
       mean share of the micro-batches' tokens that are real).
    """
    infos, first, efficiency = [], {}, []
    for epoch in range(self.parts.algorithm.ppo_epochs):
      for i, batch in enumerate(batches):
        packed = self.parts.pack(batch)
        efficiency.append(packed.efficiency)
        gradients, outputs = self._accumulate(state, packed)
        if epoch == i == 0:
          values = packing.unpack(outputs, packed)
          first = {s.origin: v for s, v in zip(batch, values, strict=True)}
        state, info = self._train_step.apply(state, gradients)
        infos.append(jax.device_get(info))
    return state, infos, first, float(np.mean(efficiency))

  def _requantize_rollout(
      self,
      state: TrainState,
      batches: list[list[Sequence]],
      infos: list[UpdateInfo],
  ) -> tuple[TrainState, Any]:
    """Lets the rollout of a mixed flow follow the masters, if they moved."""
    if self._requantizer is None or not any(info.applied for info in infos):
      return state, {}
    sequences = [sequence for batch in batches for sequence in batch]
    return self._requantizer(state, self.parts.pack(sequences).batches)


def _with_field(
    batch: list[Sequence], name: str, values: list[NpArray]
) -> list[Sequence]:
  return [
      dataclasses.replace(sequence, **{name: value})
      for sequence, value in zip(batch, values, strict=True)
  ]
