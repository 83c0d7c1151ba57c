"""Answers for the reader: held-out ones before and after, and one group."""

import dataclasses
import pathlib
import re
from typing import Any

import numpy as np

from jetrl_jax.core.files import user_path
from jetrl_jax.data import Tokenizer
from jetrl_jax.report.data import Run
from jetrl_jax.report.text import clipped, escape, number
from jetrl_jax.rl.scoring import experience, store

_PAIRS = 8
_ANSWERS = 16
# (right before, right after) -> (heading, how many are shown first).
_KINDS = {
    (False, True): ('became right', 3),
    (False, False): ('stayed wrong', 2),
    (True, False): ('became wrong', 2),
    (True, True): ('stayed right', 1),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """The sampled answers to one prompt of one training step.

  Attributes:
    step: training step.
    prompt: text.
    answers: (text, score, advantage, tokens, finish reason) of each.
  """

  step: int
  prompt: str
  answers: list[tuple[str, float, float, int, str]]


def heldout_html(run: Run) -> str:
  """Returns held-out answers, side by side where there are two evaluations."""
  if not run.samples:
    return '<p class="missing">No samples: the run evaluated nothing yet.</p>'
  steps = sorted(run.samples)
  first, last = run.samples[steps[0]], run.samples[steps[-1]]
  if len(steps) == 1 or len(first) != len(last):
    parts = [_sample(sample, [(steps[-1], sample)]) for sample in last[:_PAIRS]]
    if not parts:
      return '<p class="missing">The samples are empty.</p>'
    return f'<div class="samples">{"".join(parts)}</div>'
  kinds: dict[tuple[bool, bool], list[int]] = {kind: [] for kind in _KINDS}
  for i, (before, after) in enumerate(zip(first, last, strict=True)):
    kinds[_right(before), _right(after)].append(i)
  counts = ', '.join(
      f'<b>{len(found)}</b> {_KINDS[kind][0]}' for kind, found in kinds.items()
  )
  shown = [i for kind, found in kinds.items() for i in found[: _KINDS[kind][1]]]
  shown += [i for i in range(len(last)) if i not in shown]
  parts = [
      _sample(last[i], [(steps[0], first[i]), (steps[-1], last[i])])
      for i in shown[:_PAIRS]
  ]
  return (
      f'<p>Of {len(last)} problems, from step {steps[0]} to step {steps[-1]}:'
      f' {counts}.</p><div class="samples">{"".join(parts)}</div>'
  )


def _right(sample: dict) -> bool:
  accuracy = sample.get('accuracy')
  return isinstance(accuracy, int | float) and accuracy > 0.5


def _sample(sample: dict, answers: list[tuple[int, dict]]) -> str:
  """Returns one problem with its answers."""
  columns = ''.join(
      f'<div><h4>step {step} {_verdict(answer)}</h4>'
      f'<pre>{clipped(answer.get("response", ""))}</pre></div>'
      for step, answer in answers
  )
  expected = sample.get('answer', '')
  note = f'<p class="note">expected: {clipped(expected)}</p>'
  return (
      f'<article class="sample"><pre class="prompt">'
      f'{clipped(sample.get("prompt", ""))}</pre><div class="pair">{columns}'
      f'</div>{note if expected else ""}</article>'
  )


def _verdict(sample: dict) -> str:
  good = _right(sample)
  accuracy = sample.get('accuracy')
  value = number(accuracy) if isinstance(accuracy, int | float) else '–'
  word = 'right' if good else 'wrong'
  return (
      f'<span class="chip {"good" if good else "bad"}">{word}, {value}</span>'
  )


def group_html(run: Run) -> str:
  """Returns the answers to one training prompt, or why there are none."""
  try:
    group = last_group(run)
  except ValueError as error:
    return f'<p class="missing">No training answers: {escape(error)}.</p>'
  rows = ''.join(
      f'<tr><td class="num">{number(score)}</td>'
      f'<td class="num">{advantage:+.2f}</td><td class="num">{tokens}</td>'
      f'<td>{escape(reason)}</td><td><pre>{clipped(text)}</pre></td></tr>'
      for text, score, advantage, tokens, reason in group.answers
  )
  titles = ('reward', 'advantage', 'tokens', 'end', 'answer')
  head = ''.join(f'<th>{title}</th>' for title in titles)
  return (
      f'<p>The answers to one prompt of step {group.step}, with what the update'
      ' made of them.</p>'
      '<article class="sample group"><pre class="prompt">'
      f'{clipped(group.prompt)}</pre><div class="wide"><table><tr>{head}</tr>'
      f'{rows}</table></div></article>'
  )


def last_group(run: Run) -> Group:
  """Reads the group of the last saved rollout whose scores differ most.

  Raises:
    ValueError: no rollouts were saved, they are damaged, or the tokenizer is
      not where the run found it.
  """
  path = _last_rollouts(run)
  completions, extra = store.load_rollouts(path)
  if not completions or not {'score', 'advantage'} <= set(extra):
    raise ValueError(f'{path.name} has no scored rollouts')
  tokenizer = Tokenizer(_tokenizer_folder(run))
  ids = np.asarray([c.prompt_id for c in completions])
  score = extra['score']
  prompts = list(dict.fromkeys(ids.tolist()))
  chosen = max(prompts, key=lambda i: _deviation(score[ids == i]))
  members = np.flatnonzero(ids == chosen)[:_ANSWERS]
  return Group(
      step=int(path.stem),
      prompt=tokenizer.decode(completions[members[0]].prompt_tokens),
      answers=[
          (
              experience.response_text(completions[i], tokenizer),
              float(score[i]),
              float(extra['advantage'][i]),
              len(completions[i].tokens),
              completions[i].finish_reason,
          )
          for i in members
      ],
  )


def _deviation(scores: np.ndarray) -> float:
  """Returns the standard deviation of the scores that are there."""
  scores = scores[~np.isnan(scores)]
  return float(np.std(scores)) if len(scores) else 0.0


def _last_rollouts(run: Run) -> pathlib.Path:
  folder = run.folder / 'rollouts'
  found = sorted(folder.glob('*.npz')) if folder.is_dir() else []
  found = [p for p in found if re.fullmatch('[0-9]+', p.stem)]
  found = [p for p in found if int(p.stem) <= run.steps[-1]]
  if not found:
    raise ValueError('no rollouts were saved (trainer.save_rollouts)')
  return found[-1]


def _tokenizer_folder(run: Run) -> pathlib.Path:
  names: list[Any] = [
      run.folder / 'export',
      run.config.get('data.tokenizer'),
      run.config.get('model.path'),
  ]
  for name in names:
    folder = user_path(name) if name else None
    if folder is not None and (folder / 'tokenizer.json').is_file():
      return folder
  raise ValueError(
      'the tokenizer is not in export/, data.tokenizer or model.path, seen from'
      ' here'
  )
