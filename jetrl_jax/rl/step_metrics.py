"""Joins the numbers of a step: times, throughput, update, mismatch, health."""

import contextlib
import functools
import resource
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jetrl_jax.data import Prompt
from jetrl_jax.fp8 import health, slots
from jetrl_jax.metrics import Mean
from jetrl_jax.rl import experience, mismatch
from jetrl_jax.rl.apply import UpdateInfo
from jetrl_jax.rl.experience import Experience
from jetrl_jax.rl.objective import LossConfig
from jetrl_jax.rl.types import Completion
from jetrl_jax.typing import PyTree


class Timer:
  """Adds up seconds by phase between two `take`s."""

  def __init__(self):
    self._seconds: dict[str, float] = {}
    self._start = time.monotonic()

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    """Times a block.

    The phases end with a copy to the host, so device work is inside.
    """
    start = time.monotonic()
    try:
      yield
    finally:
      spent = time.monotonic() - start
      self._seconds[phase] = self._seconds.get(phase, 0.0) + spent

  def seconds(self, phase: str) -> float:
    """Seconds of a phase since the last `take`."""
    return self._seconds.get(phase, 0.0)

  def elapsed(self) -> float:
    """Seconds since the last `take`."""
    return time.monotonic() - self._start

  def take(self) -> dict[str, float]:
    """Returns 'timing_s/<phase>' and 'timing_s/step', and starts again."""
    times = {f'timing_s/{k}': v for k, v in self._seconds.items()}
    times['timing_s/step'] = self.elapsed()
    self._seconds, self._start = {}, time.monotonic()
    return times


def step_metrics(
    exp: Experience,
    scored: dict[int, np.ndarray],
    infos: list[UpdateInfo],
    fp8_state: PyTree,
    *,
    loss: LossConfig,
    generated: list[Completion],
    timer: Timer,
    num_devices: int,
) -> dict[str, Any]:
  """Returns all metrics of a step but those of its evaluation.

  Args:
    exp: the scored rollout.
    scored: completion's index -> the training forward's log-probs of prompt
      and response, at the rollout's weights.
    infos: one per optimiser step.
    fp8_state: the slots behind the step, on the host.
    loss: the objective; its correction caps the importance weights.
    generated: all answers that were sampled, those that were dropped included.
    timer: whose last `take` was the step's start.
    num_devices: devices that worked.
  """
  metrics: dict[str, Any] = experience.experience_metrics(exp)
  metrics |= _mismatch(exp, scored, loss)
  metrics |= update_metrics(infos)
  summary = health.summarize(fp8_state, slots.slot_paths(fp8_state))
  metrics |= health.headline(summary)
  if summary:
    metrics['fp8_health'] = summary
  metrics |= throughput(
      exp.completions, exp.prompts, generated, timer, num_devices
  )
  return metrics


def _mismatch(
    exp: Experience, scored: dict[int, np.ndarray], loss: LossConfig
) -> dict[str, float]:
  """Compares what was sampled with what the training forward computed."""
  completions = exp.completions
  join = functools.partial(experience.join_sampled, completions)
  train_T = join(
      scored[i][len(c.prompt_tokens) :] for i, c in enumerate(completions)
  )
  advantages_B = exp.advantages_PG.reshape(-1)
  corrected = loss.rollout_is != 'none'
  return mismatch.mismatch_metrics(
      rollout_logprobs=join(c.logprobs for c in completions),
      train_logprobs=train_T,
      log_mu=join(c.log_mu for c in completions),
      log_pi_old=train_T,
      advantages=join(
          np.full(len(c.tokens), advantage, np.float32)
          for c, advantage in zip(completions, advantages_B, strict=True)
      ),
      rollout_is_threshold=(
          loss.rollout_is_threshold if corrected else float('inf')
      ),
  )


def update_metrics(infos: list[UpdateInfo]) -> dict:
  """Averages the optimiser steps of one training step."""
  totals: dict[str, Mean] = {}
  for info in infos:
    for name, value in info.metrics.items():
      totals[name] = totals[name] + value if name in totals else value
  values = {name: total.value() for name, total in totals.items()}
  metrics: dict[str, Any] = {
      name: value for name, value in values.items() if value is not None
  }
  applied = [bool(info.applied) for info in infos]
  metrics |= {
      'actor/grad_norm': float(np.mean([info.grad_norm for info in infos])),
      'actor/lr': float(infos[-1].lr),
      'training/updates': sum(applied),
      'training/skipped_updates': len(applied) - sum(applied),
  }
  return metrics | _changed_bytes(infos[-1].changed_bytes)


def rollout_health(
    fp8_state: PyTree, changed: PyTree, *, operands: tuple[str, ...]
) -> dict[str, Any]:
  """Returns what `fp8/` tells of training for the rollout of a mixed flow.

  Args:
    fp8_state: the rollout's slots, on the host.
    changed: share of its weight bytes that the requantisation changed, nested
      like the slots; empty if there was none.
    operands: those that are measured.

  Returns:
    The names of `fp8/...` under `rollout_fp8/...`.
  """
  summary = health.summarize(fp8_state, slots.slot_paths(fp8_state))
  measured = {
      name: value
      for name, value in health.headline(summary).items()
      if name.split('/')[1] in operands
  }
  return {
      f'rollout_{name}': value
      for name, value in (measured | _changed_bytes(changed)).items()
  }


def _changed_bytes(shares: PyTree) -> dict[str, Any]:
  changed = _flatten(shares)
  if not changed:
    return {}
  return {
      'fp8/changed_weight_bytes/mean': float(np.mean(list(changed.values()))),
      'fp8/changed_weight_bytes/min': min(changed.values()),
      'fp8_changed_weight_bytes': changed,
  }


def _flatten(tree, path: str = '') -> dict[str, float]:
  if not isinstance(tree, dict):
    return {path.removesuffix('/kernel'): float(tree)}
  flat = {}
  for key, child in tree.items():
    flat |= _flatten(child, f'{path}/{key}' if path else key)
  return flat


def throughput(
    completions: list[Completion],
    prompts: list[Prompt],
    generated: list[Completion],
    timer: Timer,
    num_devices: int,
) -> dict[str, float]:
  """Returns perf/: tokens per second and device, and peak memory.

  perf/throughput is (prompt and response tokens of the step) / (seconds of the
  step x devices), of what was learnt from; perf/rollout_throughput counts all
  generated response tokens over the seconds of 'gen'.
  """
  responses = sum(len(c.tokens) for c in completions)
  sampled = sum(len(c.tokens) for c in generated)
  group = len(completions) // len(prompts)
  total = responses + group * sum(len(p.tokens) for p in prompts)
  metrics = {
      'perf/total_num_tokens': total,
      'perf/throughput': total / (timer.elapsed() * num_devices),
      'perf/rollout_throughput': sampled / timer.seconds('gen') / num_devices,
  }
  stats = jax.local_devices()[0].memory_stats()
  if stats and 'peak_bytes_in_use' in stats:
    metrics['perf/max_memory_allocated_gb'] = stats['peak_bytes_in_use'] / 2**30
  rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  metrics['perf/cpu_memory_used_gb'] = rss / 2**20
  return metrics
