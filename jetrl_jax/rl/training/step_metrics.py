"""A step's metrics: times, throughput, update, mismatch, FP8 health."""

import functools
import resource
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from jetrl_jax.core import sharding
from jetrl_jax.core.typing import PyTree
from jetrl_jax.fp8 import health, scaling_state
from jetrl_jax.metrics.timer import Timer
from jetrl_jax.metrics.writer import Mean
from jetrl_jax.optim.apply import UpdateInfo
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl import mismatch
from jetrl_jax.rl.objective import LossConfig
from jetrl_jax.rl.run import flops, mixed_flow
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.scoring import experience
from jetrl_jax.rl.scoring.dynamic_sampling import SampledBatch
from jetrl_jax.rl.scoring.experience import Experience
from jetrl_jax.rl.training.learner import UpdateResult
from jetrl_jax.rl.types import Completion


def step_metrics(
    spec: RunSpec,
    sampled: SampledBatch,
    result: UpdateResult,
    state: TrainState,
    timer: Timer,
) -> dict[str, Any]:
  """Returns all metrics of a step except those of its evaluation.

  Args:
    spec: the run's specification.
    sampled: the step's rollout.
    result: the result of the step's updates.
    state: the state after them.
    timer: its last `take` was at the step's start.
  """
  exp, policy = result.experience, spec.policy
  metrics: dict[str, Any] = experience.experience_metrics(exp)
  metrics |= sampled.metrics
  metrics |= _mismatch(exp, result.train_logprobs, spec.loss)
  metrics |= update_metrics(result.infos)
  metrics |= _health(state.fp8_state, scaling_state.OPERANDS)
  metrics |= throughput(
      exp.completions,
      sampled.completions,
      timer,
      policy.axes.devices,
  )
  metrics |= flops.mfu_metrics(
      policy,
      spec.rollout_policy.recipe,
      sampled.prompts,
      sampled.completions,
      timer,
      trained=exp.completions,
      ppo_epochs=spec.algorithm.ppo_epochs,
  )
  metrics['perf/packing_efficiency'] = result.packing_efficiency
  for name, k3 in (
      ('actor/update_k3', result.update_k3),
      ('rollout_actor/update_k3', result.rollout_update_k3),
  ):
    if k3 is not None:
      metrics[name] = k3
  unequal = metrics.get('training/mismatch_token_frac')
  # None without a token, as where every environment failed before its turn.
  if unequal is not None and not spec.is_mixed and policy.exact:
    metrics['alarm/inexact'] = int(unequal > 0)
  if spec.is_mixed:
    rollout = _health(
        state.rollout_fp8_state,
        mixed_flow.measured_operands(spec.rollout_policy.recipe),
    ) | _changed_bytes(result.rollout_changed)
    metrics |= {f'rollout_{name}': value for name, value in rollout.items()}
  return metrics


def _health(fp8_state: PyTree, operands: tuple[str, ...]) -> dict[str, Any]:
  """Returns `fp8/...` and `fp8_health` for the measured operands."""
  fp8_state = sharding.fetch(fp8_state)
  summary = {
      path: {operand: entries[operand] for operand in operands}
      for path, entries in health.summarize(
          fp8_state, scaling_state.dot_paths(fp8_state)
      ).items()
  }
  metrics: dict[str, Any] = health.headline(summary)
  return metrics | ({'fp8_health': summary} if summary else {})


def _mismatch(
    exp: Experience, train_logprobs: dict[int, np.ndarray], loss: LossConfig
) -> dict[str, float]:
  """Compares the rollout's log-probs with those of the training forward."""
  chosen = sorted(train_logprobs)
  completions = [exp.completions[i] for i in chosen]
  join = functools.partial(experience.join_sampled, completions)
  train_T = join(
      train_logprobs[i][len(c.prompt_tokens) :]
      for i, c in zip(chosen, completions, strict=True)
  )
  advantages_B = exp.advantages_PG.reshape(-1)[chosen]
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
      rollout_is_threshold=loss.rho_cap if corrected else float('inf'),
  )


def update_metrics(infos: list[UpdateInfo]) -> dict:
  """Averages the metrics of one training step's optimiser steps."""
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


def not_finite(count: int, last: UpdateInfo) -> str:
  """Returns the error message of a run that ends after skipped updates.

  Args:
    count: skipped updates in a row.
    last: the last of them.
  """
  return (
      f'{count} updates in a row were not finite (gradient norm'
      f' {float(last.grad_norm)}); none of them changed the weights.'
      ' Look at actor/grad_norm and fp8/ in metrics.jsonl, lower lr, or set'
      ' precision.recipe=bf16 to rule out FP8.'
  )


def _changed_bytes(shares: PyTree) -> dict[str, Any]:
  flat: dict[str, Any] = traverse_util.flatten_dict(shares, sep='/')
  changed = {
      path.removesuffix('/kernel'): float(share) for path, share in flat.items()
  }
  if not changed:
    return {}
  return {
      'fp8/changed_weight_bytes/mean': float(np.mean(list(changed.values()))),
      'fp8/changed_weight_bytes/min': min(changed.values()),
      'fp8_changed_weight_bytes': changed,
  }


def throughput(
    completions: list[Completion],
    generated: list[Completion],
    timer: Timer,
    num_devices: int,
) -> dict[str, float]:
  """Returns perf/: tokens per second and device, and peak memory.

  perf/throughput is (prompt and response tokens that the step learnt from) /
  (seconds of the step x devices). perf/rollout_throughput is (all sampled
  response tokens) / (seconds of 'gen' x devices).
  """
  total = sum(len(c.prompt_tokens) + len(c.tokens) for c in completions)
  sampled = sum(len(c.tokens) for c in generated)
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
