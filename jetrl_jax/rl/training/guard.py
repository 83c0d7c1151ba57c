"""The guard: bounds on a step's numbers that first warn, and then act.

It decides and touches nothing. From the settings, what it remembers and the
metrics of a step follow what it says, and the one action that is due before the
next step; `guard_actions.py` carries that out.

    a bound is exceeded          warn
    `patience` steps in a row    act: the first of these that is allowed and can
                                 help with what is over
        recalibrate              measure all scales anew, forget their histories
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
from jetrl_jax.rl.training.guard_state import Action, GuardState

# Where these are not finite, no scale can be measured and no dot is to blame.
_FINITE = ('actor/grad_norm', 'training/rollout_logprob_diff_max')
# Name of a dot -> operand -> shares, in the metrics of a step.
_HEALTH = ('fp8_health', 'rollout_fp8_health')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breach:
  """One bound that a step exceeded.

  Attributes:
    metric: its name.
    value: of the step; the worst dot's where dots are named.
    bound: as configured; infinity where any finite value will do.
    dots: that are over it, worst first; of a share of saturated or flushed.
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
  """What follows from a step.

  Attributes:
    state: the guard's, with the action that is due.
    breaches: bounds that were exceeded.
    verdict: what is done about them, in words.
    exhausted: another rollback would be due, and there have been enough.
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
    """Returns what is over and what is done about it; '' for nothing."""
    if not self.breaches:
      return ''
    return f'guard: {"; ".join(map(str, self.breaches))}: {self.verdict}'


def breaches(
    config: GuardConfig, metrics: Mapping[str, Any]
) -> tuple[Breach, ...]:
  """Returns the bounds that the metrics of a step exceed.

  A value that is not finite is over every bound; one that was not measured (no
  token was sampled, so none was compared) is over none.
  """
  found = [
      Breach(metric=name, value=metrics[name], bound=math.inf)
      for name in _FINITE
      if name in metrics and not math.isfinite(metrics[name])
  ]
  bounds = {
      'training/mismatch_token_frac': config.max_mismatch_token_frac,
      'rollout_corr/k3_kl': config.max_k3,
  }
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
  """Returns what follows from the metrics of a step.

  Args:
    config: bounds and actions.
    state: behind the step before, nothing due.
    metrics: of the step.
    step: its number.
    saved: whether its state becomes a checkpoint by the run's schedule. (One
      that a stop leaves behind does not count: a run that was never stopped
      does not have it.)
    has_histories: whether a side of the flow has delayed scales: others are
      measured anew at every use.
    is_mixed: whether rollout and training differ in precision.
  """
  over = breaches(config, metrics)
  state = _remembered(config, state, bool(over), step, saved)
  if state.over < config.patience:
    verdict = f'a warning, {state.over} of {config.patience} steps in a row'
    return Decision(state=state, breaches=over, verdict=verdict)
  dots = tuple(dict.fromkeys(dot for breach in over for dot in breach.dots))
  if is_mixed and not dots:
    # Precision is what the two sides differ in: the dot that loses most.
    dots = _noisiest(metrics)
  if not all(math.isfinite(breach.value) for breach in over):
    dots = ()
  for name in config.actions:
    match name:
      case 'recalibrate' if dots and has_histories and not state.recalibrated:
        due = Action(name=name)
        verdict = 'all scales are measured anew before the next step'
      case 'high_precision' if dots:
        due = Action(name=name, dots=dots)
        verdict = f'from the next step on in high precision: {", ".join(dots)}'
      case 'rollback' if state.good:
        if state.rollbacks >= config.max_rollbacks:
          verdict = f'the run ends, it was rolled back {state.rollbacks} times'
          return Decision(
              state=state, breaches=over, verdict=verdict, exhausted=True
          )
        due = Action(name=name, step=state.good)
        verdict = f'back to the checkpoint of step {state.good}'
      case _:
        continue
    state = dataclasses.replace(state, over=0, due=due)
    return Decision(state=state, breaches=over, verdict=verdict)
  verdict = 'no action that is allowed could help'
  return Decision(state=state, breaches=over, verdict=verdict)


def _remembered(
    config: GuardConfig, state: GuardState, over: bool, step: int, saved: bool
) -> GuardState:
  """Counts the step, and which checkpoints it makes good.

  A step's numbers speak of the weights that it began with. So what it leaves is
  good once it was within all bounds and the step behind it was, too.
  """
  if over:
    # What a bad step follows is suspect.
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
  """Returns the dot with the least signal over quantisation noise, if any."""
  ratios = [
      (entry['sqnr_db'], dot)
      for name in _HEALTH
      if name in metrics
      for dot, operands in metrics[name].items()
      # What the forward quantises: no log-prob depends on gradients. Of a
      # rollout with dynamic scales only the kernels are measured.
      for operand, entry in operands.items()
      if operand != 'output_grad' and 'sqnr_db' in entry
  ]
  return (min(ratios)[1],) if ratios else ()
