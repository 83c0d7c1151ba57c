"""What an evaluation found: a summary, a row per problem, a table."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jetrl_jax.data import Tokenizer
from jetrl_jax.evaluate.settings import Settings
from jetrl_jax.rewards import math_answer
from jetrl_jax.rl.scoring import evaluation_metrics, experience
from jetrl_jax.rl.scoring.evaluation import Graded

_INTERVAL = (
    "95%, Wilson's over problems with the effective sample size; normal where"
    ' an accuracy is outside [0, 1]'
)


def summary(
    graded: Graded, settings: Settings, seconds: float, reads_answers: bool
) -> dict[str, Any]:
  """Returns the means over problems, by data source.

  Args:
    graded: answers and scores.
    settings: the settings of the evaluation.
    seconds: wall time, compilation and calibration included.
    reads_answers: whether a reward is known to read final answers.
  """
  reads_answers |= any(r.prediction for r in graded.results)
  # Shown with a strict reward: how many of its zeros come only from the form of
  # the answer.
  strict = {spec.function for spec in settings.rewards} & {'math', 'gsm8k'}
  found, recipe = settings.found, settings.found.policy.recipe
  sources = {}
  for source in sorted({prompt.source for prompt in graded.prompts}):
    rows = [i for i, p in enumerate(graded.prompts) if p.source == source]
    sources[source] = _of_source(graded, rows, reads_answers)
    if strict and (lenient := _last_number(graded, rows, settings.tokenizer)):
      sources[source]['last_number'] = lenient
  tokens = sum(len(c.tokens) for c in graded.completions)
  return {
      'checkpoint': found.origin,
      'recipe': recipe.name,
      'scales': _scales(settings),
      'num_generations': settings.num_generations,
      'temperature': settings.temperature,
      'top_k': settings.top_k,
      'top_p': settings.top_p,
      'min_p': settings.min_p,
      'seed': settings.seed,
      'max_prompt_length': settings.max_prompt_length,
      'max_response_length': settings.max_response_length,
      'rewards': [spec.function for spec in settings.rewards],
      'over_long_left_out': settings.num_filtered,
      'sources': sources,
      'interval': _INTERVAL,
      'seconds': seconds,
      'response_tokens': tokens,
      'jax': jax.__version__,
  }


def _scales(settings: Settings) -> str:
  if settings.found.policy.recipe.name == 'bf16':
    return 'none'
  if settings.found.calibrated:
    return 'of the checkpoint'
  return 'calibrated on the first prompts'


def _last_number(
    graded: Graded, rows: list[int], tokenizer: Tokenizer
) -> dict[str, Any] | None:
  """Returns the row of `_of_source` by the reward 'last_number'.

  It is over the problems whose reference is a number; None if none is.
  """
  k, scores, answers = graded.num_generations, [], []
  for i in rows:
    # A strict reward has refused references that are no text.
    expected = math_answer.parse_number(str(graded.prompts[i].answer))
    if expected is None:
      continue
    texts = [
        experience.response_text(completion, tokenizer)
        for completion in graded.of_prompt(i, graded.completions)
    ]
    values = [
        math_answer.parse_last(math_answer.last_number(text)) for text in texts
    ]
    scores.append([float(value == expected[0]) for value in values])
    answers.append([None if v is None else str(v) for v in values])
  if not scores:
    return None
  values = evaluation_metrics.by_problem(np.asarray(scores), answers)
  return {
      'problems': len(scores),
      **{f'{name}@{k}': _with_interval(v, k) for name, v in values.items()},
      'without_answer': float(
          np.mean([v is None for row in answers for v in row])
      ),
  }


def _of_source(
    graded: Graded, rows: list[int], reads_answers: bool
) -> dict[str, Any]:
  k = graded.num_generations
  accuracy_PG = graded.accuracy_PG[rows]
  answers = [graded.answers[i] for i in rows]
  completions = [
      c for i in rows for c in graded.of_prompt(i, graded.completions)
  ]
  results = [r for i in rows for r in graded.of_prompt(i, graded.results)]
  errors = sorted({r.error for r in results if r.error})
  values = evaluation_metrics.by_problem(accuracy_PG, answers)
  return {
      'problems': len(rows),
      **{f'{name}@{k}': _with_interval(v, k) for name, v in values.items()},
      'response_length_mean': float(
          np.mean([len(c.tokens) for c in completions])
      ),
      'truncated': float(
          np.mean([c.finish_reason == 'length' for c in completions])
      ),
      # None: the reward does not say whether it found one.
      'without_answer': float(np.mean([not r.prediction for r in results]))
      if reads_answers
      else None,
      'unscored': sum(r.score is None for r in results),
      'errors': {e: sum(r.error == e for r in results) for e in errors},
  }


def _with_interval(values_P: np.ndarray, k: int) -> dict[str, float | None]:
  """Returns the mean over problems, and its 95% interval.

  A reward of one's own may leave [0, 1], where Wilson's interval is not
  defined: then the normal one, which a single problem does not have.
  """
  value = float(values_P.mean())
  if values_P.min() >= 0 and values_P.max() <= 1:
    low, high = evaluation_metrics.wilson_interval_95(values_P, k)
    return {'value': value, 'low': low, 'high': high}
  if len(values_P) < 2:
    return {'value': value, 'low': None, 'high': None}
  half = evaluation_metrics.half_width_95(values_P)
  return {'value': value, 'low': value - half, 'high': value + half}


def problems(graded: Graded, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
  """Yields a row per problem, with all its answers."""
  answers = graded.answers
  votes = evaluation_metrics.any_votes(answers)
  for i, prompt in enumerate(graded.prompts):
    values = evaluation_metrics.by_problem(
        graded.accuracy_PG[i : i + 1], [answers[i]]
    )
    found = {name: float(value_P[0]) for name, value_P in values.items()}
    if found and votes:
      found.setdefault('maj', 0.0)
    samples = zip(
        graded.of_prompt(i, graded.completions),
        graded.of_prompt(i, graded.results),
        strict=True,
    )
    yield {
        'id': prompt.id,
        'source': prompt.source,
        'prompt': prompt.text,
        'answer': prompt.answer,
        'mean': found.get('mean'),
        'maj': found.get('maj'),
        'best': found.get('best'),
        'samples': [
            {
                'response': experience.response_text(completion, tokenizer),
                'prediction': result.prediction,
                'accuracy': result.accuracy,
                'score': result.score,
                'error': result.error,
                'tokens': len(completion.tokens),
                'finish_reason': completion.finish_reason,
            }
            for completion, result in samples
        ],
    }


def table(found: dict[str, Any], device: str) -> str:
  """Returns the summary for a terminal."""
  k = found['num_generations']
  lines = [
      f'{found["checkpoint"]}, {found["recipe"]} (scales: {found["scales"]})',
      f'{k} {"samples" if k > 1 else "sample"} per problem at temperature'
      f' {found["temperature"]:g}, seed {found["seed"]}; {device}, jax'
      f' {found["jax"]}',
      '',
  ]
  # With one sample all three are the same.
  kinds = ('mean', 'maj', 'best') if k > 1 else ('mean',)
  names = [f'{kind}@{k}' for kind in kinds]
  head = ''.join(f'{name:>24}' for name in names)
  lines.append(
      f'{"":<14}{"problems":>9}{head}{"length":>8}{"cut off":>9}'
      f'{"no answer":>11}'
  )
  for source, row in found['sources'].items():
    lines.append(_row(source, row, names))
    if lenient := row.get('last_number'):
      lines.append(_row('  last_number', lenient, names))
  lines.append('')
  lines.append(f'[low, high]: {found["interval"]}.')
  if any('last_number' in row for row in found['sources'].values()):
    strict = ' + '.join(found['rewards'])
    lines.append(
        f'The first line is by {strict}, which wants its form of answer;'
        ' last_number takes the last number of the response, of the problems'
        ' whose answer is a number.'
    )
  if found['over_long_left_out']:
    lines.append(
        f'{found["over_long_left_out"]} problems were left out: longer than'
        f' {found["max_prompt_length"]} tokens.'
    )
  for source, row in found['sources'].items():
    if row['unscored']:
      lines.append(
          f'{source}: {row["unscored"]} answers count nowhere: every reward'
          ' returned None.'
      )
    for error, count in row['errors'].items():
      lines.append(f'{source}: {count} answers count 0 ({error}).')
  return '\n'.join(lines)


def _row(label: str, row: dict[str, Any], names: list[str]) -> str:
  cells = ''.join(f' {_cell(row.get(name)):>23}' for name in names)
  line = f'{label:<14}{row["problems"]:>9}{cells}'
  length, cut = row.get('response_length_mean'), row.get('truncated')
  line += f'{"" if length is None else f"{length:.0f}":>8}'
  line += f'{"" if cut is None else f"{cut:.1%}":>9}'
  none = row['without_answer']
  return line + f'{"-" if none is None else f"{none:.1%}":>11}'


def _cell(entry: dict[str, float | None] | None) -> str:
  if entry is None:  # No reward read an answer to vote with.
    return '-'
  numbers = [x for x in entry.values() if x is not None]
  # What leaves [0, 1] is a reward in the place of an accuracy, and no share.
  form = '.1%' if all(0 <= x <= 1 for x in numbers) else '.4g'
  if entry['low'] is None:
    return f'{entry["value"]:{form}}'
  return (
      f'{entry["value"]:{form}} [{entry["low"]:{form}}, {entry["high"]:{form}}]'
  )
