"""The terms of a score, and their weighted sum.

A term is a function from a request to a `Part`. Nothing here is bounded in
time: it runs in the workers of `rewards/pool.py`.
"""

import dataclasses
import fractions
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from jetrl_jax.rewards import math_answer
from jetrl_jax.rewards.custom import load_custom
from jetrl_jax.rewards.types import (
    Part,
    RewardFunctionError,
    RewardRequest,
    RewardResult,
    RewardSpec,
)

Term: TypeAlias = Callable[[RewardRequest], Part]


def math(request: RewardRequest) -> Part:
  r"""Scores 1 if the last `\boxed{}` (else '####') holds the answer, else 0."""
  answer = math_answer.extract_answer(request.response_text)
  if math_answer.is_refused(answer, request.answer):
    return Part(value=0.0, accuracy=0.0, prediction='', error='refused')
  return _judged(request, answer, math_answer.is_right(answer, request.answer))


def gsm8k(request: RewardRequest) -> Part:
  """Scores 1 if '#### x' gives the reference number exactly, else 0.

  Strict: x is all that stands on the line after the last '####', an integer or
  a decimal, with thousands separators or a dollar sign at most.
  """
  answer = math_answer.after_marks(request.response_text)
  number = math_answer.parse_number(answer)
  expected = _expected(request.answer, request.source)
  return _judged(request, answer, number == expected)


def _judged(request: RewardRequest, answer: str, right: bool) -> Part:
  # Votes are counted over texts: a right answer is named as the reference
  # writes it, so that 1/2 and 0.5 vote for the same.
  prediction = request.answer if right else _vote(answer)
  value = float(right)
  return Part(value=value, accuracy=value, prediction=prediction, error=None)


def _expected(answer: str, source: str) -> tuple[fractions.Fraction, bool]:
  number = math_answer.parse_number(answer)
  if number is None:
    raise RewardFunctionError(
        f"reward 'gsm8k' compares numbers, and the reference answer of a prompt"
        f" of {source!r} is {answer!r}; use 'math' for it."
    )
  return number


def check_references(
    specs: Sequence[RewardSpec], references: Iterable[tuple[str, str]]
) -> None:
  """Refuses now the reference answer that would end a later step.

  Args:
    specs: the terms of the score.
    references: answer and source of each prompt.

  Raises:
    RewardFunctionError: 'math' or 'gsm8k' is a term, and there is no answer;
      'gsm8k' is, and an answer is no number.
  """
  compares = {'math', 'gsm8k'} & {spec.function for spec in specs}
  for answer, source in references if compares else ():
    if not answer:
      raise RewardFunctionError(
          f'reward {min(compares)!r} compares with a reference answer, and the'
          f" prompts of {source!r} have none (answer_key is ''); name their"
          ' column, or a reward that needs none.'
      )
    if 'gsm8k' in compares:
      _expected(answer, source)


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


def build_term(spec: RewardSpec) -> Term:
  """Makes the function of a spec; imports the user's module.

  Raises:
    RewardFunctionError: the user's function cannot be loaded, or takes neither
      verl's nor TRL's arguments.
  """
  match spec.function:
    case 'math':
      return math
    case 'gsm8k':
      return gsm8k
    case 'format':
      return _format(spec.kwargs['pattern'])
    case _:
      return load_custom(spec)


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
    return RewardResult(
        score=sum(spec.weight * value for spec, value in values),
        accuracy=known[0] if known else (parts[0].value or 0.0),
        parts={spec.label: value for spec, value in values},
        prediction=next((p.prediction for p in parts if p.prediction), ''),
        error=next((p.error for p in parts if p.error), None),
    )
