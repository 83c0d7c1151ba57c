"""Workdirs for the tests of the report, written as a run writes them."""

import json
import pathlib
from typing import Any

from jetrl_jax.metrics.writer import MetricWriter

STEPS = 6
DOTS = [f'layers_{i}/{kind}' for i in (0, 1) for kind in ('attn/o', 'mlp/down')]


def line(step: int) -> dict[str, Any]:
  """The metrics of a step; those of step 0 are an evaluation alone."""
  metrics: dict[str, Any] = {'timing_s/step': 2.0 + 10.0 * (step == 0)}
  if step % 3 == 0:
    metrics['val-core/heldout/acc/mean@1'] = 0.25 + 0.1 * step
    metrics['val-core/heldout/acc/mean@1/ci95'] = 0.05
  if step == 0:
    return metrics
  return metrics | {
      'critic/rewards/mean': 0.1 * step,
      'response_length/mean': 10.0 + step,
      'response_length/min': 3.0,
      'response_length/max': 20.0,
      'response_length/clip_ratio': 0.125,
      'actor/grad_norm': 10.0**-step,
      'actor/pg_clipfrac': 0.0,
      'training/mismatch_token_frac': 0.0,
      'training/updates': 2,
      'training/skipped_updates': int(step == 4),
      'reward/timeout': 3,
      'perf/throughput': 100.0,
      'timing_s/gen': 0.5,
      'timing_s/update_actor': 1.25,
      'fp8_health': {dot: _health(i, step) for i, dot in enumerate(DOTS)},
      'fp8_changed_weight_bytes': dict.fromkeys(DOTS, 0.02),
  }


def _health(dot: int, step: int) -> dict[str, dict[str, float]]:
  """Inputs lose more at later dots, kernels nothing, gradients much."""
  return {
      'input': {
          'saturated_frac': 0.0,
          'flushed_frac': 0.001 * dot,
          'sqnr_db': 30.0 + dot + step,
      },
      'kernel': {'saturated_frac': 0.0, 'flushed_frac': 0.0},
      'output_grad': {
          'saturated_frac': 1e-5 * (step == 2),
          'flushed_frac': 0.2,
          'sqnr_db': 25.0,
      },
  }


def write(
    folder: pathlib.Path,
    *,
    steps: int = STEPS,
    config: dict[str, Any] | None = None,
    answer: str = 'an answer',
) -> pathlib.Path:
  """Writes a workdir: metrics, config, start, samples."""
  writer = MetricWriter(folder, tensorboard=False)
  for step in range(steps + 1):
    writer.write(step, line(step))
  writer.close()
  settings = {
      'model': {'path': 'a/model'},
      'optim': {'lr': 1e-5, 'betas': [0.9, 0.98]},
      'trainer': {'total_training_steps': STEPS},
  }
  (folder / 'config.json').write_text(json.dumps(settings | (config or {})))
  start = {
      'time': '2026-01-02T03:04:05+00:00',
      'command': ['main.py', '--config=x.py'],
      'versions': {'jax': '9.9.9'},
      'commit': 'abc123',
      'device': 'cpu',
      'num_devices': 1,
      'train_prompts': 90,
      'train_left_out': 10,
  }
  (folder / 'starts.jsonl').write_text(json.dumps(start) + '\n')
  (folder / 'samples').mkdir()
  for step, right in ((0, [0, 0, 1, 1]), (3, [0] * 4), (6, [1, 0, 0, 1])):
    samples = [
        {
            'prompt': f'problem {i}',
            'response': f'{answer} {i} of step {step}',
            'answer': str(i),
            'accuracy': float(value),
            'finish_reason': 'length' if i == 3 else 'stop',
        }
        for i, value in enumerate(right)
    ]
    text = '\n'.join(map(json.dumps, samples)) + '\n'
    (folder / f'samples/{step:06d}.jsonl').write_text(text)
  return folder
