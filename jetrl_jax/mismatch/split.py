"""Splits the mismatch of one step by cause, on the same tokens.

One step of the run is taken: a rollout, its rewards, its updates. The log-prob
of each sampled token is then computed several times. Each time one more thing
is as in training:

    log mu        the distribution that was sampled
    decode        log pi of the decode step, over the whole vocabulary
    packed        the rollout's recipe, in the training forward's shapes
    trained       training's recipe, in the same program and shapes
    updated       the forward inside the update's program
    late          the same, with the weights after the step

A cause is the difference of two neighbours. For every token the causes add up
to log mu - updated, the mismatch of this step. With stale weights they add up
to log mu - late, the mismatch of a rollout that is one step old. (The sums are
rounded in the last place of a float64.)
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetrl_jax.core import sharding
from jetrl_jax.mismatch.forced_decode import forced_logprobs
from jetrl_jax.mismatch.start import Start
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl import mismatch, packing
from jetrl_jax.rl.packing import Sequence
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.run import mixed_flow
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.scoring import experience
from jetrl_jax.rl.scoring.experience import Experience, join_sampled
from jetrl_jax.rl.training.learner import UpdateResult
from jetrl_jax.rl.types import Completion

# Completion's index to per-token log-probs of prompt and response.
_Scored = dict[int, np.ndarray]
THIS_STEP, ONE_STEP_LATE = 'this step', 'one step late'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """Two log-probs of the same tokens.

  Attributes:
    name: the cause, or the name of a total.
    compared: what is compared, as text.
    metrics: see `rl.mismatch.mismatch_metrics`.
  """

  name: str
  compared: str
  metrics: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
  """The result of a split.

  Attributes:
    tokens: number of compared sampled tokens.
    sequences: number of responses.
    causes: causes in the order of the sum; the last one is stale weights.
    totals: this step (without stale weights), and one step late.
    rest: nats, the largest difference over all tokens between a total and the
      sum of its causes, which is rounding of float64.
    shapes: mismatch of the same tokens in other slots and packings; not part of
      the sums.
    learnt: the result of the step's updates.
  """

  tokens: int
  sequences: int
  causes: list[Row]
  totals: list[Row]
  rest: float
  shapes: list[Row]
  learnt: UpdateResult


def split(start: Start) -> Split:
  """Takes the run's next step and splits its mismatch.

  Args:
    start: its state is donated.
  """
  spec, state = start.spec, start.state
  exp = start.rollout()
  batches = experience.mini_batches(
      exp,
      spec.algorithm,
      mini_batch_size=spec.run.mini_batch_size,
      max_response_length=spec.engine.max_response_length,
  )
  scorer = _Scorer(spec, batches)
  rollout_params = mixed_flow.rollout_params(state)
  params = PolicyParams(state.weights, state.fp8_state)
  packed = trained = scorer(spec.policy, params)
  if spec.is_mixed:
    packed = scorer(spec.rollout_policy, rollout_params)
  updated = _in_update(start, batches, state)
  shapes = _in_other_slots(start, exp, rollout_params)
  shapes += _in_other_packings(scorer, exp, spec.policy, params, trained)
  state, learnt = start.learner.learn(state, exp)
  late = _in_update(start, batches, state)
  answers = exp.completions
  points = [
      join_sampled(answers, [c.log_mu for c in answers]),
      join_sampled(answers, [c.logprobs for c in answers]),
      *(_responses(answers, s) for s in (packed, trained, updated, late)),
  ]
  causes, totals, rest = add_up(_causes(spec), points, _advantages(exp))
  return Split(
      tokens=points[0].size,
      sequences=len(answers),
      causes=causes,
      totals=totals,
      rest=rest,
      shapes=shapes,
      learnt=learnt,
  )


def _in_update(
    start: Start, batches: list[list[Sequence]], state: TrainState
) -> _Scored:
  """Returns the log-probs of the forward inside the update's program."""
  return {
      sequence.origin: values
      for batch in batches
      for sequence, values in zip(
          batch, start.learner.logprobs_in_update(batch, state), strict=True
      )
  }


def add_up(
    names: list[tuple[str, str]],
    points: list[np.ndarray],
    advantages: np.ndarray,
) -> tuple[list[Row], list[Row], float]:
  """Splits a chain of log-probs into its n differences (links).

  Args:
    names: (name, what is compared) of each link; the last is stale weights.
    points: n + 1 float32 arrays of the same tokens, nats.
    advantages: the tokens' advantages.

  Returns:
    (a row per link, the rows of the chain without and with its last link,
     largest difference over the tokens between a chain and its links).
  """
  wide = [point.astype(np.float64) for point in points]
  links = [one - other for one, other in itertools.pairwise(wide)]
  causes = [
      _row(name, compared, one, other, advantages)
      for (name, compared), (one, other) in zip(
          names, itertools.pairwise(points), strict=True
      )
  ]
  totals, rests = [], []
  for name, when, count in (
      (THIS_STEP, 'in', len(links) - 1),
      (ONE_STEP_LATE, 'after', len(links)),
  ):
    words = f'log mu and training {when} this step'
    totals.append(_row(name, words, points[0], points[count], advantages))
    rest = np.sum(links[:count], axis=0) - (wide[0] - wide[count])
    rests.append(float(np.abs(rest).max(initial=0.0)))
  return causes, totals, max(rests)


def _causes(spec: RunSpec) -> list[tuple[str, str]]:
  """Returns (name, what is compared) of each cause."""
  engine, recipe = spec.engine, spec.policy.recipe.name
  sampling = spec.rollout_policy.recipe.name
  truncation = [
      f'{name}={value}'
      for name, value, off in (
          ('top_k', engine.top_k, engine.top_k <= 0),
          ('top_p', engine.top_p, engine.top_p >= 1),
          ('min_p', engine.min_p, engine.min_p <= 0),
      )
      if not off
  ]
  quantisation = f'{sampling} and {recipe}, packed forward'
  if not spec.is_mixed:
    quantisation = f'{recipe} on both sides: nothing to compare'
  return [
      (
          'sampling transform',
          ', '.join(truncation) + ' and none' if truncation else 'none is set',
      ),
      ('kernel, batch shape', f'decode and packed forward, {sampling}'),
      ('quantisation', quantisation),
      ("update's program", f'forward alone and with its backward, {recipe}'),
      ('stale weights', "weights before and after the step's updates"),
  ]


class _Scorer:
  """Computes log-probs in training's shapes, for any recipe and packing."""

  def __init__(self, spec: RunSpec, batches: list[list[Sequence]]):
    self._spec, self._batches = spec, batches
    self._compiled: dict[Policy, Any] = {}

  def __call__(
      self, policy: Policy, params: PolicyParams, rows: int = 1, length: int = 1
  ) -> _Scored:
    """Returns the log-probs of all sequences, mini-batch by mini-batch.

    Args:
      policy: training's or the rollout's policy.
      params: params of the policy's recipe.
      rows: divides the run's rows per micro-batch.
      length: multiplies the run's row length.
    """
    spec, mesh, found = self._spec, self._spec.mesh, {}
    if policy not in self._compiled:
      specs = PolicyParams(*(sharding.tree_specs(t, mesh) for t in params))
      by_row = sharding.ROWS
      run = sharding.per_device(
          policy.logprobs,
          mesh,
          (specs, by_row, jax.sharding.PartitionSpec()),
          (by_row, by_row),
      )
      self._compiled[policy] = policy.jit(run)
    temperature = jnp.float32(spec.run.temperature)
    run_rows, run_length = spec.batch_shape
    devices = spec.policy.axes.size
    for batch in self._batches:
      packed = packing.pack(
          batch,
          row_length=run_length * length,
          rows_per_micro_batch=-(-run_rows // (rows * devices)) * devices,
          tile=spec.policy.tile,
      )
      values = [
          self._compiled[policy](params, micro, temperature)[0]
          for micro in packed.batches
      ]
      unpacked = packing.unpack(jax.device_get(values), packed)
      found |= {s.origin: v for s, v in zip(batch, unpacked, strict=True)}
    return found


def _in_other_slots(
    start: Start, exp: Experience, params: PolicyParams
) -> list[Row]:
  """Decodes the rollout's tokens again, in fewer and in more slots."""
  spec, completions = start.spec, exp.completions
  ours = join_sampled(completions, [c.logprobs for c in completions])
  fewest, rows = 16 * spec.policy.axes.size, []
  slots = start.engine.num_slots
  for count in dict.fromkeys((slots, fewest, 2 * slots)):
    engine = start.engine
    if count != slots:
      config = dataclasses.replace(spec.engine, num_slots=count)
      engine = Engine(spec.rollout_policy, config, spec.mesh)
    again = forced_logprobs(
        engine, params, completions, temperature=spec.run.temperature
    )
    rows.append(
        _row(
            'slots',
            f'the rollout ({slots} slots) and the same tokens in {count}',
            ours,
            join_sampled(completions, again),
            _advantages(exp),
        )
    )
  return rows


def _in_other_packings(
    scorer: _Scorer,
    exp: Experience,
    policy: Policy,
    params: PolicyParams,
    trained: _Scored,
) -> list[Row]:
  """Computes the rollout's log-probs again, in other micro-batches."""
  ours, rows = _responses(exp.completions, trained), []
  for words, times in (
      ('half the rows', {'rows': 2}),
      ('rows of twice the length', {'length': 2}),
  ):
    other = scorer(policy, params, **times)
    rows.append(
        _row(
            'packing',
            f"the run's micro-batches and {words}",
            ours,
            _responses(exp.completions, other),
            _advantages(exp),
        )
    )
  return rows


def _row(name, compared, one, other, advantages) -> Row:
  return Row(
      name=name,
      compared=compared,
      metrics=mismatch.mismatch_metrics(
          rollout_logprobs=one,
          train_logprobs=other,
          log_mu=one,
          log_pi_old=other,
          advantages=advantages,
      ),
  )


def _responses(completions: list[Completion], scored: _Scored) -> np.ndarray:
  return join_sampled(
      completions,
      [scored[i][len(c.prompt_tokens) :] for i, c in enumerate(completions)],
  )


def _advantages(exp: Experience) -> np.ndarray:
  flat = exp.advantages_PG.reshape(-1)
  return join_sampled(
      exp.completions,
      [
          np.full(len(c.tokens), a, np.float32)
          for c, a in zip(exp.completions, flat, strict=True)
      ],
  )
