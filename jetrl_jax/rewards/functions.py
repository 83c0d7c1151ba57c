"""The terms of a score, and their weighted sum.

A term is a function from a request to a `Part`. Nothing here is bounded in
time: it runs in the workers of `rewards/pool.py`.
"""

import dataclasses
import decimal
import fractions
import functools
import numbers
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from absl import logging

from jetrl_jax.rewards import math_answer
from jetrl_jax.rewards.custom import load_custom
from jetrl_jax.rewards.types import (
    Columns,
    Part,
    RewardFunctionError,
    RewardRequest,
    RewardResult,
    RewardSpec,
)

Term: TypeAlias = Callable[[RewardRequest], Part]


def math(request: RewardRequest, after: str = '') -> Part:
  r"""Scores 1 if the last `\boxed{}` (else '####') holds the answer, else 0.

  Args:
    request: the response and its reference.
    after: read what follows the last such text; '' reads it all.
  """
  answer = math_answer.extract_answer(_rest(request.response_text, after))
  reference = _reference(request.answer, request.source, 'math')
  try:
    if math_answer.is_refused(answer, reference, request.prompt_text):
      # It has a vote, because the question was answered.
      vote = _vote(answer)
      return Part(value=0.0, accuracy=0.0, prediction=vote, error='refused')
    right = math_answer.is_right(answer, reference)
  except MemoryError:
    raise
  except Exception:  # A text that a model writes must not end its run.
    logging.exception(
        'the reward math failed at the answer %.200r; its reference is %.200r',
        answer,
        reference,
    )
    return Part(value=0.0, accuracy=0.0, prediction='', error='failed')
  return _judged(reference, answer, right)


def gsm8k(request: RewardRequest, after: str = '') -> Part:
  """Scores 1 if '#### x' gives the reference number exactly, else 0.

  Strict: x is all that stands on the line after the last '####', an integer or
  a decimal, with thousands separators or a dollar sign at most.

  Args:
    request: the response and its reference.
    after: see `math`.
  """
  answer = math_answer.after_marks(_rest(request.response_text, after))
  number = math_answer.parse_number(answer)
  reference = _reference(request.answer, request.source, 'gsm8k')
  expected = _expected(reference, request.source, 'gsm8k')
  return _judged(reference, answer, number == expected)


def last_number(request: RewardRequest, after: str = '') -> Part:
  """Scores 1 if the last number of the response is the reference's, else 0.

  For models that write 'The answer is 42.' and no box. Lenient: a number that
  the response names last for another reason is its answer, too.

  Args:
    request: the response and its reference.
    after: see `math`.
  """
  answer = math_answer.last_number(_rest(request.response_text, after))
  reference = _reference(request.answer, request.source, 'last_number')
  expected, _ = _expected(reference, request.source, 'last_number')
  right = math_answer.parse_last(answer) == expected
  return _judged(reference, answer, right)


def _rest(response: str, after: str) -> str:
  """Returns the text after the last `after`; '' without one."""
  if not after:
    return response
  start = response.rfind(after)
  return '' if start < 0 else response[start + len(after) :]


def _judged(reference: str, answer: str, right: bool) -> Part:
  # Votes are counted over texts: a right answer is named as the reference
  # writes it, so that 1/2 and 0.5 vote for the same.
  prediction = reference if right else _vote(answer)
  value = float(right)
  return Part(value=value, accuracy=value, prediction=prediction, error=None)


def _reference(answer: Any, source: str, reward: str) -> str:
  """Returns the reference as a text, a number as `data.load_examples` does."""
  if isinstance(answer, str):
    return answer
  if isinstance(answer, numbers.Integral) and not isinstance(answer, bool):
    return str(int(answer))
  if isinstance(answer, numbers.Real) and not isinstance(answer, bool):
    written = decimal.Decimal(repr(float(answer)))
    if written.is_finite():
      return format(written, 'f')
  raise RewardFunctionError(
      f'reward {reward!r} compares texts and numbers, and the'
      f' reference answer of a prompt of {source!r} is {_shown(answer)};'
      ' name the column or the field with its text (data.answer_key, as in'
      " 'reward_model.ground_truth'), or a function of your own."
  )


def _expected(
    answer: str, source: str, reward: str
) -> tuple[fractions.Fraction, bool]:
  number = math_answer.parse_number(answer)
  if number is None:
    raise RewardFunctionError(
        f'reward {reward!r} compares numbers, and the reference answer of a'
        f" prompt of {source!r} is {answer!r}; use 'math' for it."
    )
  return number


def check_references(
    specs: Sequence[RewardSpec], references: Iterable[tuple[Any, str]]
) -> None:
  """Refuses now the reference answer that would end a later step.

  Args:
    specs: the terms of the score.
    references: answer and source of each prompt.

  Raises:
    RewardFunctionError: a built-in term compares with an answer, and there is
      none or one that is neither text nor number; for 'gsm8k' and
      'last_number', no number.
  """
  functions = {spec.function for spec in specs}
  compares = {'math', 'gsm8k', 'last_number'} & functions
  for answer, source in references if compares else ():
    reference = _reference(answer, source, min(compares))
    if not reference:
      raise RewardFunctionError(
          f'reward {min(compares)!r} compares with a reference answer, and the'
          f" prompts of {source!r} have none (answer_key is ''); name their"
          ' column, or a reward that needs none.'
      )
    for reward in sorted(compares - {'math'}):
      _expected(reference, source, reward)


def _shown(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 80 else text[:77] + '...'


def _vote(answer: str) -> str:
  number = math_answer.parse_number(answer)
  return ''.join(answer.split()) if number is None else str(number[0])


def _format(pattern: str) -> Term:
  """Scores 1 where the pattern is found; '.' matches line ends too."""
  compiled = re.compile(pattern, re.DOTALL)

  def term(request: RewardRequest) -> Part:
    found = float(compiled.search(request.response_text) is not None)
    return Part(value=found, accuracy=None, prediction='', error=None)

  return term


def build_term(spec: RewardSpec, columns: Columns = ()) -> Term:
  """Makes the function of a spec; imports the user's module.

  Args:
    spec: the term.
    columns: see `load_custom`.

  Raises:
    RewardFunctionError: see `load_custom`.
  """
  match spec.function:
    case 'math':
      return functools.partial(math, **spec.kwargs)
    case 'gsm8k':
      return functools.partial(gsm8k, **spec.kwargs)
    case 'last_number':
      return functools.partial(last_number, **spec.kwargs)
    case 'format':
      return _format(spec.kwargs['pattern'])
    case _:
      return load_custom(spec, columns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedSum:
  """The score of an answer: sum over terms of weight * value.

  Attributes:
    specs: the terms' settings.
    terms: their functions, in the same order.
  """

  specs: Sequence[RewardSpec]
  terms: Sequence[Term]

  def __call__(self, request: RewardRequest) -> RewardResult:
    """Scores one answer; a term's error does not hide the other terms."""
    parts = [term(request) for term in self.terms]
    values = [
        (spec, part.value)
        for spec, part in zip(self.specs, parts, strict=True)
        if part.value is not None
    ]
    known = [p.accuracy for p in parts if p.accuracy is not None]
    known += [value for _, value in values]
    score = sum(spec.weight * value for spec, value in values)
    return RewardResult(
        score=score if values else None,
        accuracy=known[0] if values else None,
        parts={spec.label: value for spec, value in values},
        prediction=next((p.prediction for p in parts if p.prediction), ''),
        error=next((p.error for p in parts if p.error), None),
    )
