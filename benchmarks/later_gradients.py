r"""What an update leaves of the gradients of a rollout's later mini-batches.

    python -m benchmarks.later_gradients --config=configs/quickstart.py \
        --config.trainer.mini_batch_size=4 --output=benchmarks/results/NAME

With several updates a rollout, the policy of a later mini-batch is no longer
the one that sampled it. Its ratios correct for that, and PPO's clip bounds
them. In 8 bits a ratio is rounding too, however small the update (see
docs/numerics.md). This takes a rollout of the run, updates on its first
mini-batch, and takes the gradient of all others: with the ratios as they are,
in PPO and in CISPO, and with ratios of 1. Each is held against the gradient of
the same answers before the update, which is on-policy:

* cosine: 1 where an update leaves it as it was. BF16 says what the update alone
  does to it;
* length: of that gradient, as a share;
* drift: length of the part of PPO's that depends on no advantage. It is half
  the sum of the gradients with advantages of +1 and of -1 everywhere, which
  cancel but for what is clipped. CISPO has none.

Masters start spread in 8-bit recipes, and as stored in BF16, as in a run. The
rollouts follow each other, with all updates in between.
"""

import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags
from ml_collections import config_flags

from benchmarks import common
from jetrl_jax.config import build as configs
from jetrl_jax.core.typing import NpArray
from jetrl_jax.mismatch import start as mismatch_start
from jetrl_jax.mismatch.start import Start
from jetrl_jax.optim.apply import Gradients
from jetrl_jax.rl import packing
from jetrl_jax.rl.objective import LossConfig, policy_loss
from jetrl_jax.rl.packing import Sequence
from jetrl_jax.rl.run.gradients import UpdatePrograms
from jetrl_jax.rl.scoring import experience

_CONFIG = config_flags.DEFINE_config_file('config', None, 'Config file.')
_VARIANTS = flags.DEFINE_list(
    'variants',
    ['fp8_delayed', 'bf16'],
    'Recipes, see precision.recipe; options: see `common.overrides`.',
)
_ROLLOUTS = flags.DEFINE_integer('rollouts', 3, 'Of each variant.')
# Of a gradient, on the host.
Leaves: TypeAlias = list[NpArray]
_COLUMNS = (
    ('variant', 'variant', ''),
    ('rollout', 'rollout', 'd'),
    ('k3', 'k3 of the update', '.2e'),
    ('ppo_cosine', 'PPO: cosine', '.3f'),
    ('ppo_length', 'length', '.2f'),
    ('ppo_drift', 'drift', '.2f'),
    ('cispo_cosine', 'CISPO: cosine', '.3f'),
    ('cispo_length', 'length', '.2f'),
    ('one_cosine', 'ratio 1: cosine', '.3f'),
)


class Measure:
  """The programs of one variant, and a state that its rollouts train.

  Args:
    start: of the run; its state is taken over.
  """

  def __init__(self, start: Start):
    self.start, self.spec, self.state = start, start.spec, start.state
    loss = self.spec.loss
    self.ppo = self._programs(loss)
    self.cispo = self._programs(dataclasses.replace(loss, policy_loss='cispo'))

  def _programs(self, loss: LossConfig) -> UpdatePrograms:
    spec = self.spec
    return UpdatePrograms(
        spec.policy,
        functools.partial(policy_loss, loss),
        spec.optimizer.build(),
        spec.optimizer,
        spec.mesh,
        self.state,
    )

  def _gradients(
      self, programs: UpdatePrograms, batch: list[Sequence]
  ) -> tuple[Gradients, list[np.ndarray]]:
    """Returns gradients at the present weights, and log-probs a sequence."""
    packed = self.spec.pack(batch, self.spec.smaller_batch_shapes)
    gradients = programs.zero_gradients(self.state)
    temperature, values = jnp.float32(self.spec.run.temperature), []
    for micro in packed.batches:
      gradients, logprobs, _ = programs.accumulate(
          self.state, gradients, micro, temperature
      )
      values.append(logprobs)
    return gradients, packing.unpack(values, packed)

  def _host(self, programs: UpdatePrograms, batch: list[Sequence]) -> Leaves:
    gradients, _ = self._gradients(programs, batch)
    return [np.asarray(x) for x in jax.tree.leaves(gradients.trainable)]

  def _train(self, batch: list[Sequence]) -> None:
    gradients, _ = self._gradients(self.ppo, batch)
    self.state, _ = self.ppo.apply(self.state, gradients)

  def rollout(self, number: int) -> dict[str, Any]:
    """Takes a rollout and all its updates, and measures after the first one."""
    exp = self.start.collector.collect(number, self.state).experience
    first, *later = experience.mini_batches(
        exp,
        self.spec.algorithm,
        mini_batch_size=self.spec.run.mini_batch_size,
        max_response_length=self.spec.engine.max_response_length,
    )
    rest = [sequence for batch in later for sequence in batch]
    wanted = self._host(self.ppo, rest)
    self._train(first)
    row = self._compared(wanted, rest)
    for batch in later:
      self._train(batch)
    rolled = self.ppo.roll_inputs(self.state.fp8_state)
    self.state = dataclasses.replace(self.state, fp8_state=rolled)
    return {'rollout': number, 'answers': len(rest)} | row

  def _compared(self, wanted: Leaves, rest: list[Sequence]) -> dict[str, float]:
    _, logprobs = self._gradients(self.ppo, rest)
    row = {'k3': _k3(rest, logprobs)}
    for name, programs in (('ppo', self.ppo), ('cispo', self.cispo)):
      found = self._host(programs, rest)
      row[f'{name}_cosine'] = cosine(found, wanted)
      row[f'{name}_length'] = length(found) / length(wanted)
    # Advantages of one sign everywhere, then of the other.
    signed = [
        self._host(self.ppo, [_with_advantage(x, sign) for x in rest])
        for sign in (1.0, -1.0)
    ]
    drift = [(a + b) / 2 for a, b in zip(*signed, strict=True)]
    row['ppo_drift'] = length(drift) / length(wanted)
    as_old = [
        dataclasses.replace(sequence, old_logprobs=values)
        for sequence, values in zip(rest, logprobs, strict=True)
    ]
    row['one_cosine'] = cosine(self._host(self.ppo, as_old), wanted)
    return row


def _with_advantage(sequence: Sequence, value: float) -> Sequence:
  advantages = np.full_like(sequence.advantages, value)
  return dataclasses.replace(sequence, advantages=advantages)


def _k3(rest: list[Sequence], logprobs: list[np.ndarray]) -> float:
  gaps = [
      (values - sequence.old_logprobs)[sequence.loss_mask > 0]
      for sequence, values in zip(rest, logprobs, strict=True)
  ]
  gap = np.concatenate(gaps).astype(np.float64)
  return float((np.exp(gap) - 1 - gap).mean())


def _dot(one: Leaves, other: Leaves) -> float:
  return sum(
      float(np.vdot(a.astype(np.float64), b.astype(np.float64)))
      for a, b in zip(one, other, strict=True)
  )


def length(leaves: Leaves) -> float:
  """Returns the Euclidean norm over all leaves."""
  return _dot(leaves, leaves) ** 0.5


def cosine(one: Leaves, other: Leaves) -> float:
  """Returns the cosine of the angle between two gradients; 0 if one is 0."""
  lengths = length(one) * length(other)
  return _dot(one, other) / lengths if lengths else 0.0


def measured(config: ml_collections.ConfigDict) -> list[dict[str, Any]]:
  """Returns a row for each rollout of one variant.

  Raises:
    ValueError: a rollout has a single update, or the loss is not PPO's.
  """
  spec = configs.build(config)
  run = spec.run
  if spec.loss.policy_loss != 'ppo':
    raise ValueError(
        f'algorithm.policy_loss={spec.loss.policy_loss}: PPO and CISPO are'
        " compared; leave it 'ppo'"
    )
  if run.mini_batch_size == run.train_batch_size:
    raise ValueError(
        f'trainer.mini_batch_size={run.mini_batch_size} is all of'
        f' trainer.train_batch_size: no mini-batch is later than an update; set'
        f' it to {run.train_batch_size // 4 or 1}'
    )
  with mismatch_start.start(spec, None) as start:
    measure = Measure(start)
    return [measure.rollout(i) for i in range(_ROLLOUTS.value)]


def main(argv: list[str]) -> None:
  """Measures each variant and writes the record."""
  del argv
  rows, summary = [], {}
  for variant in _VARIANTS.value:
    config = ml_collections.ConfigDict(_CONFIG.value)
    config.update_from_flattened_dict(common.overrides(variant))
    for row in measured(config):
      rows.append({'variant': variant} | row)
      print(rows[-1], flush=True)
    for name in ('ppo_cosine', 'cispo_cosine', 'one_cosine', 'ppo_drift'):
      values = [row[name] for row in rows if row['variant'] == variant]
      summary[f'{variant}: {name}, mean'] = round(float(np.mean(values)), 3)
  common.write(rows, summary, common.table(rows, _COLUMNS))


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  common.run(main)
