"""The guard: bounds on a step's metrics that first warn and then act.

This file only decides. A decision follows from the settings, from what the
guard remembers and from the step's metrics. It holds a message and at most one
action, which `guard_actions.py` carries out before the next step.

    a bound is exceeded          warn
    `patience` steps in a row    act: choose the first of these actions that is
                                 allowed and can help
        recalibrate              measure all scales again, clear their histories
        high_precision           compute the dots over a bound in the compute
                                 dtype, in rollout and training alike
        rollback                 go back to the last good checkpoint
    `patience` more              act again
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jetrl_jax.fp8 import health
from jetrl_jax.rl.settings import GuardConfig

# If one of these is not finite, no scale can be measured and no dot is the
# cause.
_FINITE = ('actor/grad_norm', 'training/rollout_logprob_diff_max')
# Metrics that map dot -> operand -> shares.
_HEALTH = ('fp8_health', 'rollout_fp8_health')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Action:
  """An action to carry out before the next step.

  Attributes:
    name: one of `settings.GUARD_ACTIONS`.
    dots: paths of the dots, for 'high_precision'.
    step: the checkpoint's step, for 'rollback'; 0 for the other actions.
  """

  name: str
  dots: tuple[str, ...] = ()
  step: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardState:
  """What the guard remembers from step to step.

  It is part of every checkpoint. The decision after a step is saved with that
  step and carried out before the next one, so a run that is killed and resumed
  does the same, and a reader of a checkpoint knows its precision.

  Attributes:
    over: steps in a row that exceeded a bound, since the last action.
    within: steps in a row within all bounds.
    recalibrated: whether the scales were measured again and fewer than
      `patience` steps in a row have been within all bounds since then.
    high_precision: dots that actions have put into high precision.
    rollbacks: number of rollbacks so far.
    candidate: the newest saved step within all bounds that the next step has
      not confirmed yet; 0 is none.
    good: the newest saved step that was confirmed; 0 is none.
    due: the action that is decided and not carried out yet.
  """

  over: int = 0
  within: int = 0
  recalibrated: bool = False
  high_precision: tuple[str, ...] = ()
  rollbacks: int = 0
  candidate: int = 0
  good: int = 0
  due: Action | None = None

  def to_json(self) -> dict[str, Any]:
    """Returns what `from_json` reads: JSON types, so lists and no tuples."""
    saved = dataclasses.asdict(self)
    saved['high_precision'] = list(self.high_precision)
    if self.due is not None:
      saved['due']['dots'] = list(self.due.dots)
    return saved

  @classmethod
  def from_json(cls, saved: Mapping[str, Any]) -> 'GuardState':
    """Returns the state that `to_json` saved."""
    due = saved['due']
    if due is not None:
      due = Action(**due | {'dots': tuple(due['dots'])})
    dots = tuple(saved['high_precision'])
    return cls(**dict(saved) | {'high_precision': dots, 'due': due})

  @classmethod
  def of_checkpoint(cls, host_state: Mapping[str, Any]) -> 'GuardState':
    """Returns the guard's state in a checkpoint; without one, the default."""
    if 'guard' not in host_state:
      return cls()
    return cls.from_json(host_state['guard'])

  def done(self) -> 'GuardState':
    """Returns the state after the due action was carried out."""
    action = self.due
    assert action is not None
    return dataclasses.replace(
        self,
        due=None,
        recalibrated=self.recalibrated or action.name == 'recalibrate',
        high_precision=self.high_precision + action.dots,
        rollbacks=self.rollbacks + (action.name == 'rollback'),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breach:
  """One bound that a step exceeded.

  Attributes:
    metric: the metric's name.
    value: the step's value; the worst dot's value if there are `dots`.
    bound: the configured bound; infinity if any finite value is allowed.
    dots: the dots over the bound, worst first; only for saturated_frac and
      flushed_frac.
  """

  metric: str
  value: float
  bound: float
  dots: tuple[str, ...] = ()

  def __str__(self) -> str:
    if math.isinf(self.bound):
      return f'{self.metric} is {self.value}'
    text = f'{self.metric} is {self.value:.3g}, bound {self.bound:g}'
    return text + (f' ({", ".join(self.dots)})' if self.dots else '')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
  """What the guard decided after a step.

  Attributes:
    state: the guard's next state, with the action that is due.
    breaches: bounds that were exceeded.
    verdict: what the run does about them, as text.
    exhausted: whether another rollback would be due but max_rollbacks is
      reached.
  """

  state: GuardState
  breaches: tuple[Breach, ...]
  verdict: str
  exhausted: bool = False

  def metrics(self) -> dict[str, Any]:
    """Returns `guard/...`, see docs/metrics.md."""
    action, kept = self.state.due, self.state.high_precision
    metrics: dict[str, Any] = {'guard/over': len(self.breaches)}
    if kept:
      metrics['guard/high_precision_dots'] = len(kept)
    if action is not None:
      metrics[f'guard/{action.name}'] = len(action.dots) or 1
      if action.name == 'rollback':
        metrics['guard/rollback_to'] = action.step
      if action.dots:
        metrics['guard_dots'] = dict.fromkeys(action.dots, 1)
    return metrics

  def sentence(self) -> str:
    """Returns the breaches and the verdict as text; '' without a breach."""
    if not self.breaches:
      return ''
    return f'guard: {"; ".join(map(str, self.breaches))}: {self.verdict}'


def breaches(
    config: GuardConfig, metrics: Mapping[str, Any]
) -> tuple[Breach, ...]:
  """Returns the bounds that the metrics of a step exceed.

  A value that is not finite exceeds every bound. A value that was not measured
  (no token was sampled, so none was compared) exceeds none.
  """
  found = [
      Breach(metric=name, value=metrics[name], bound=math.inf)
      for name in _FINITE
      if name in metrics and not math.isfinite(metrics[name])
  ]
  bounds = {
      'training/mismatch_token_frac': config.max_mismatch_token_frac,
  }
  if config.max_k3 is not None:
    bounds['rollout_corr/k3_kl'] = config.max_k3
  if config.max_logprob_diff is not None:
    bounds['training/rollout_logprob_diff_max'] = config.max_logprob_diff
  found += [
      Breach(metric=name, value=metrics[name], bound=bound)
      for name, bound in bounds.items()
      if name in metrics and not metrics[name] <= bound
  ]
  for name in _HEALTH:
    for share, bound in (
        ('saturated_frac', config.max_saturated_frac),
        ('flushed_frac', config.max_flushed_frac),
    ):
      if name in metrics:
        found += _dots_over(name, metrics[name], share, bound)
  return tuple(found)


def _dots_over(
    name: str, summary: Mapping[str, Any], share: str, bound: float
) -> list[Breach]:
  """Returns a breach if any operand of any dot is over the bound."""
  found: dict[str, list[float]] = {}
  for dot, _, value in health.shares(summary, share):
    found.setdefault(dot, []).append(value)
  worst = {dot: max(values) for dot, values in found.items()}
  dots = sorted(
      (dot for dot, value in worst.items() if not value <= bound),
      key=lambda dot: (-worst[dot], dot),
  )
  if not dots:
    return []
  metric = f'{name.removesuffix("_health")} {share}'
  return [
      Breach(metric=metric, value=worst[dots[0]], bound=bound, dots=tuple(dots))
  ]


def decide(
    config: GuardConfig,
    state: GuardState,
    metrics: Mapping[str, Any],
    *,
    step: int,
    saved: bool,
    has_histories: bool,
    is_mixed: bool,
) -> Decision:
  """Returns the guard's decision after a step.

  Args:
    config: bounds and actions.
    state: the guard's state after the previous step, with no action due.
    metrics: the step's metrics.
    step: the step's number.
    saved: whether save_freq makes a checkpoint of this step. A checkpoint that
      exists only because the run was stopped does not count, because a run
      that was never stopped does not have it.
    has_histories: whether the rollout or the training has delayed scales. Other
      scales are measured again at every use.
    is_mixed: whether rollout and training differ in precision.
  """
  over = breaches(config, metrics)
  state = _remembered(config, state, bool(over), step, saved)
  if state.over < config.patience:
    verdict = f'a warning, {state.over} of {config.patience} steps in a row'
    return Decision(state=state, breaches=over, verdict=verdict)
  dots = tuple(dict.fromkeys(dot for breach in over for dot in breach.dots))
  if is_mixed and not dots:
    # The two sides differ in precision, so choose the dot that loses most.
    dots = _noisiest(metrics)
  if not all(math.isfinite(breach.value) for breach in over):
    dots = ()
  for name in config.actions:
    match name:
      case 'recalibrate' if dots and has_histories and not state.recalibrated:
        due = Action(name=name)
        verdict = 'all scales are measured again before the next step'
      case 'high_precision' if dots:
        due = Action(name=name, dots=dots)
        verdict = f'high precision from the next step on: {", ".join(dots)}'
      case 'rollback' if state.good:
        if state.rollbacks >= config.max_rollbacks:
          verdict = f'the run ends; it was rolled back {state.rollbacks} times'
          return Decision(
              state=state, breaches=over, verdict=verdict, exhausted=True
          )
        due = Action(name=name, step=state.good)
        verdict = f'back to the checkpoint of step {state.good}'
      case _:
        continue
    state = dataclasses.replace(state, over=0, due=due)
    return Decision(state=state, breaches=over, verdict=verdict)
  verdict = 'no allowed action could help'
  return Decision(state=state, breaches=over, verdict=verdict)


def _remembered(
    config: GuardConfig, state: GuardState, over: bool, step: int, saved: bool
) -> GuardState:
  """Counts the step and updates which checkpoint is good.

  A step's metrics describe the weights that it started with. A checkpoint is
  therefore good once its step and the next step were within all bounds.
  """
  if over:
    # The weights that a bad step started with are suspect.
    return dataclasses.replace(
        state, over=state.over + 1, within=0, candidate=0
    )
  within = state.within + 1
  return dataclasses.replace(
      state,
      over=0,
      within=within,
      recalibrated=state.recalibrated and within < config.patience,
      good=state.candidate or state.good,
      candidate=step if saved else 0,
  )


def _noisiest(metrics: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns the dot with the most quantisation noise, if one is measured."""
  ratios = [
      (entry['sqnr_db'], dot)
      for name in _HEALTH
      if name in metrics
      for dot, operands in metrics[name].items()
      # Only what the forward quantises, because no log-prob depends on
      # gradients. A rollout with dynamic scales measures only its kernels.
      for operand, entry in operands.items()
      if operand != 'output_grad' and 'sqnr_db' in entry
  ]
  return (min(ratios)[1],) if ratios else ()
