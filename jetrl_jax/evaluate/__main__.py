"""Measures accuracy: jetrl_jax evaluate --checkpoint=... --data=... .

A run's checkpoint or a Hugging Face one, on GSM8K, MATH-500 or rows of your
own, through the engine that samples rollouts. What the run says of prompts and
rewards holds unless a flag says otherwise. See docs/evaluate.md.
"""

import contextlib
import functools
import json
import time
from typing import Any

import jax
import numpy as np
from absl import logging

from jetrl_jax.config import flags as config_flags
from jetrl_jax.core import processes, rng
from jetrl_jax.core.files import replace_text
from jetrl_jax.data.dataset import columns_of
from jetrl_jax.evaluate import report as evaluate_report
from jetrl_jax.evaluate import settings as evaluate_settings
from jetrl_jax.evaluate.settings import Settings
from jetrl_jax.metrics.console import Progress
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.rewards import RewardPool
from jetrl_jax.rl.rollout.engine import Engine, EngineConfig
from jetrl_jax.rl.rollout.scheduler import never_stop
from jetrl_jax.rl.run import calibration
from jetrl_jax.rl.scoring import evaluation
from jetrl_jax.rl.scoring.scorer import Scorer


def evaluate(settings: Settings) -> dict:
  """Grades a policy and writes the results.

  Args:
    settings: see `evaluate_settings.resolve`.

  Returns:
    What summary.json holds.

  Raises:
    ValueError: anything that cannot work, with the fix.
  """
  found, start = settings.found, time.monotonic()
  config_flags.make_folder('output', settings.output)
  prompts = settings.prompts
  engine = Engine(found.policy, _engine_config(settings), found.mesh)
  state = found.state
  if not found.calibrated:
    state = calibration.calibrate_checkpoint(
        engine, state, prompts, origin=found.origin, seed=settings.seed
    )
  logging.info(
      '%s in %s: %d prompts, %d samples each; compiling first',
      found.origin,
      found.policy.recipe.name,
      len(prompts),
      settings.num_generations,
  )
  # The rows of this process.
  total = len(engine.group.share(len(prompts))) * settings.num_generations
  with (
      contextlib.closing(Progress('answers', total)) as shown,
      RewardPool(
          settings.rewards,
          columns=columns_of(prompts),
          **settings.reward_limits,
      ) as pool,
  ):
    graded = evaluation.grade(
        engine,
        PolicyParams(state.weights, state.fp8_state),
        prompts,
        pool,
        settings.tokenizer,
        num_generations=settings.num_generations,
        temperature=settings.temperature,
        base_key=rng.key(settings.seed, rng.EVALUATION, 0),
        should_stop=never_stop,
        watch=functools.partial(_show, shown),
    )
    reads_answers = pool.reads_answers
  seconds = time.monotonic() - start
  summary = evaluate_report.summary(graded, settings, seconds, reads_answers)
  rows = evaluate_report.problems(graded, settings.tokenizer)
  if not processes.is_first():
    return summary
  lines = [json.dumps(row, ensure_ascii=False) + '\n' for row in rows]
  replace_text(settings.output / 'problems.jsonl', ''.join(lines))
  replace_text(
      settings.output / 'summary.json', json.dumps(summary, indent=2) + '\n'
  )
  return summary


def _show(shown: Progress, scores: Scorer) -> None:
  """Shows how many answers have ended, and the accuracy so far."""
  ended, known = scores.so_far()
  # The first to end are short ones.
  note = f'accuracy so far {np.mean(known):.1%}' if known else ''
  shown.update(ended, note)


def _engine_config(settings: Settings) -> EngineConfig:
  wanted = len(settings.prompts) * settings.num_generations
  return EngineConfig(
      num_slots=min(settings.num_slots, wanted),
      # A CPU takes seconds a token of many answers: it says more often where it
      # is. On a GPU a visit of the host costs time.
      decode_block=8
      if jax.default_backend() == 'cpu'
      else EngineConfig.decode_block,
      max_prompt_length=settings.max_prompt_length,
      max_response_length=settings.max_response_length,
      stop_ids=tuple(settings.tokenizer.eos_ids),
      top_k=settings.top_k,
      top_p=settings.top_p,
      min_p=settings.min_p,
  )


def main(values: dict[str, Any]) -> None:
  """Evaluates as the flags say."""
  settings = evaluate_settings.resolve(values)
  summary = evaluate(settings)
  device = jax.devices()[0].device_kind
  print(evaluate_report.table(summary, device))
  print(f'\n{settings.output}/problems.jsonl, summary.json')


if __name__ == '__main__':
  config_flags.run_plain(
      main, evaluate_settings.FLAGS, ['checkpoint', 'data'], several=True
  )
