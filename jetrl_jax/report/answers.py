"""Answers for the reader: the held-out ones and the training ones, by step.

A page holds the answers of as many steps as its budget allows, each step a
compressed block that the browser opens when it is looked at. What a model
wrote is untrusted: `visible` shows what would hide, and the page puts it in
as text only.
"""

import base64
import collections
import dataclasses
import json
import pathlib
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jetrl_jax.core.files import user_path
from jetrl_jax.data import Tokenizer
from jetrl_jax.metrics.provenance import path_of_run
from jetrl_jax.report.run import Run, read_objects
from jetrl_jax.rewards import math_answer
from jetrl_jax.rl.scoring import experience, store

# Only the head and the tail of a long text are shown.
_HEAD, _TAIL = 6000, 2000
# How the rewards that read a final answer find it; '' where there is none.
_READERS = {
    'math': math_answer.extract_answer,
    'gsm8k': math_answer.after_marks,
    'last_number': math_answer.last_number,
}
_BECAME = {
    (False, True): 'became right',
    (False, False): 'stayed wrong',
    (True, False): 'became wrong',
    (True, True): 'stayed right',
}


@dataclasses.dataclass(frozen=True)
class Answers:
  """One kind of answers of a run.

  Attributes:
    blocks: step -> base64 of zlib of JSON: a list of problems, each a dict of
      'prompt', 'expected' and 'answers'; an answer is a dict of 'text',
      'right', 'score', 'advantage', 'tokens', 'end' and 'found' (a final
      answer). What is not known is null.
    lead: sentences above them.
    unanswered: share of the last step's answers that hold no final answer;
      None where that is not known.
  """

  blocks: dict[int, str]
  lead: list[str]
  unanswered: float | None


def visible(text: Any) -> str:
  """Returns text in which nothing hides.

  Characters that show nothing or turn the text around (controls, bidirectional
  overrides, lone surrogates) are written as escapes.
  """
  text = str(text)
  if text.isascii() and text.isprintable():
    return text
  return ''.join(
      # U+00A0, which is a space that does not break, is not `isprintable`.
      c
      if c.isprintable() or c in '\n\t\xa0'
      else c.encode('unicode_escape').decode('ascii')
      for c in text
  )


def clipped(text: Any) -> str:
  """Returns the visible text; of a long one the beginning and the end."""
  text = str(text)
  left_out = len(text) - _HEAD - _TAIL
  if left_out <= 0:
    return visible(text)
  cut = f'\n[... {left_out} characters are left out ...]\n'
  return visible(text[:_HEAD]) + cut + visible(text[-_TAIL:])


def heldout(run: Run, budget: int) -> Answers:
  """Reads the samples of the evaluations.

  Args:
    run: the run.
    budget: most characters of all blocks together; the last step and the first
      are always kept.
  """
  files, is_found = run.by_step('samples/*.jsonl'), _finder(run)
  notes: list[str] = []

  def read(step: int) -> list[dict]:
    return [_sample(s, is_found) for s in read_objects(files[step], notes)]

  steps = [step for step in files if step <= run.steps[-1]]
  lead = [] if steps else ['The workdir holds no samples of an evaluation.']
  if len(steps) > 1:
    before, after = map(_right, (read(steps[0]), read(steps[-1])))
    counts = collections.Counter(
        (before[k], after[k]) for k in after if k in before
    )
    became = ', '.join(f'{counts[k]} {name}' for k, name in _BECAME.items())
    which = f'from step {steps[0]} to step {steps[-1]}'
    lead = [f'Of {counts.total()} problems, {which}: {became}.']
  return _packed(read, steps, budget, lead, notes)


def training(run: Run, budget: int) -> Answers:
  """Reads the saved rollouts; why there are none is said in `lead`."""
  files, is_found = run.by_step('rollouts/*.npz'), _finder(run)
  steps = [step for step in files if step <= run.steps[-1]]
  notes: list[str] = []
  try:
    if not steps:
      raise ValueError('no rollouts were saved (trainer.save_rollouts)')
    tokenizer = Tokenizer(_tokenizer_folder(run))
  except ValueError as error:
    return Answers({}, [f'No training answers: {error}.'], None)

  def read(step: int) -> list[dict]:
    try:
      return _groups(files[step], tokenizer, is_found)
    # What else the arrays of a damaged file may raise.
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
      notes.append(f'Left out: {error}.')
      return []

  return _packed(read, steps, budget, [], notes)


def _packed(
    read: Callable[[int], list[dict]],
    steps: list[int],
    budget: int,
    lead: list[str],
    notes: list[str],
) -> Answers:
  """Packs the last step, the first, and then those between, evenly spread."""
  blocks: dict[int, str] = {}
  newest: list[bool | None] = []
  for step in _spread(steps):
    problems = read(step)
    newest = newest or [a['found'] for p in problems for a in p['answers']]
    text = json.dumps(problems, separators=(',', ':'))
    block = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    if len(blocks) > 1 and len(block) + sum(map(len, blocks.values())) > budget:
      lead = [
          *lead,
          f'The page holds the answers of {len(blocks)} of {len(steps)} steps;'
          ' --answers_mib sets how much room they may take.',
      ]
      break
    blocks[step] = block
  known = [found for found in newest if found is not None]
  unanswered = known.count(False) / len(known) if known else None
  lead = [*lead, *dict.fromkeys(notes)]
  return Answers(dict(sorted(blocks.items())), lead, unanswered)


def _spread(steps: list[int]) -> list[int]:
  """Orders steps so that each beginning of the list is spread over the run."""
  order, queue = [steps[-1], steps[0]] if steps else [], [(0, len(steps) - 1)]
  for low, high in queue:
    middle = (low + high) // 2
    if high - low > 1:
      order.append(steps[middle])
      queue += [(low, middle), (middle, high)]
  return list(dict.fromkeys(order))


def _answer(
    text: str, is_found: Callable[[str], bool | None], **more: Any
) -> dict:
  names = ('right', 'score', 'advantage', 'tokens', 'end')
  known = dict.fromkeys(names) | more
  return {'text': clipped(text), 'found': is_found(text)} | known


def _sample(sample: dict, is_found: Callable[[str], bool | None]) -> dict:
  """Returns a held-out problem with its one answer."""
  accuracy = sample.get('accuracy')
  right = accuracy > 0.5 if isinstance(accuracy, int | float) else None
  end = clipped(sample.get('finish_reason', ''))
  text = str(sample.get('response', ''))
  return {
      'prompt': clipped(sample.get('prompt', '')),
      'expected': clipped(sample.get('answer', '')),
      'answers': [_answer(text, is_found, right=right, end=end)],
  }


def _groups(
    path: pathlib.Path,
    tokenizer: Tokenizer,
    is_found: Callable[[str], bool | None],
) -> list[dict]:
  """Returns the prompts of a step, those whose scores differ most first."""
  completions, extra = store.load_rollouts(path)
  if not completions or not {'score', 'accuracy', 'advantage'} <= set(extra):
    raise ValueError(f'{path.name} has no scored rollouts')
  scores = np.nan_to_num(extra['score'])
  ids = np.asarray([c.prompt_id for c in completions])
  groups = [np.flatnonzero(ids == i) for i in dict.fromkeys(ids.tolist())]
  groups.sort(key=lambda rows: -scores[rows].std())
  return [
      {
          'prompt': clipped(
              tokenizer.decode(completions[rows[0]].prompt_tokens)
          ),
          'expected': '',
          'answers': [
              _answer(
                  experience.response_text(completions[i], tokenizer),
                  is_found,
                  right=bool(extra['accuracy'][i] > 0.5),
                  score=float(scores[i]),
                  advantage=float(np.nan_to_num(extra['advantage'][i])),
                  tokens=len(completions[i].tokens),
                  end=visible(completions[i].finish_reason),
              )
              for i in rows
          ],
      }
      for rows in groups
  ]


def _right(problems: list[dict]) -> dict[tuple[str, int], bool]:
  """Returns (prompt, how many equal ones came before) -> is it right."""
  seen, found = collections.Counter[str](), {}
  for problem in problems:
    key = problem['prompt'], seen[problem['prompt']]
    found[key] = bool(problem['answers'][0]['right'])
    seen[problem['prompt']] += 1
  return found


def _finder(run: Run) -> Callable[[str], bool | None]:
  """Returns a function that finds final answers in texts; None: unknown."""
  terms = run.config.get('reward.functions')
  names = [str(term) for term in terms] if isinstance(terms, list) else []
  readers = [_READERS[name] for name in names if name in _READERS]
  if not readers or run.config.get('environment.name'):
    return lambda text: None
  return lambda text: any(read(text) for read in readers)


def _tokenizer_folder(run: Run) -> pathlib.Path:
  names = map(run.config.get, ('data.tokenizer', 'model.path'))
  named = [path_of_run(run.folder, name) for name in names if name]
  for name in (run.folder / 'export', *named):
    folder = user_path(name)
    if (folder / 'tokenizer.json').is_file():
      return folder
  raise ValueError(
      'the tokenizer is not in export/, data.tokenizer or model.path, seen from'
      ' the folder where the run was started or from here'
  )
