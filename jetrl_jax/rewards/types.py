"""The records that go into a reward and come out of it."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

# Of each kind of row: its source, and the names of its columns.
Columns: TypeAlias = Sequence[tuple[str, tuple[str, ...]]]
# Functions that read a final answer.
READERS = ('math', 'gsm8k', 'last_number')
BUILT_IN = (*READERS, 'format')
# Largest value and weight. Their squares must fit into a float32.
MAX_SIZE = 1e9


def _not_a_name(function: Any) -> str:
  """Says how to name a function; processes of their own import it."""
  if not callable(function):
    return (
        f'a reward is {function!r}; allowed: {", ".join(BUILT_IN)}, or the name'
        " of a function: 'package.module.function', 'path/to/file.py:function'"
    )
  name = getattr(function, '__name__', '')
  name = name if name.isidentifier() else 'my_reward'
  return (
      f'a reward is the object {function!r}; rewards are named, because'
      ' processes of their own import them. Write it to a file and name it:'
      f" 'my_rewards.py:{name}' (in a notebook: %%writefile my_rewards.py)"
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardSpec:
  """One term of the score.

  Attributes:
    function: 'math', 'gsm8k', 'last_number', 'format', or a Python function: a
      dotted path ('package.module.function') or a file
      ('path/to/file.py:function').
    weight: factor of this term in the sum.
    kwargs: keyword arguments of the function. 'format' takes exactly
      {'pattern': regex}. The other built-in ones take {'after': text} or none:
      the answer is then looked for after the last such text, e.g. '</think>',
      and a response without it has none.
  """

  function: str
  weight: float = 1.0
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    """Refuses values that no worker could run."""
    if not isinstance(self.function, str):
      raise ValueError(_not_a_name(self.function))
    if not abs(self.weight) <= MAX_SIZE:
      raise ValueError(
          f'reward {self.function!r} has weight {self.weight} (of'
          ' reward.weights); it must be'
          f' finite, and between {-MAX_SIZE:g} and {MAX_SIZE:g}.'
      )
    if self.function not in BUILT_IN:
      if not re.fullmatch(r'.+[.:][A-Za-z_]\w*', self.function):
        raise ValueError(
            f'reward {self.function!r} is neither built in'
            f' ({", ".join(BUILT_IN)}) nor a path; write other functions as'
            " 'package.module.function' or 'path/to/file.py:function'."
        )
      return
    if self.function != 'format':
      if set(self.kwargs) - {'after'}:
        raise ValueError(
            f'reward {self.function!r} has kwargs {sorted(self.kwargs)}; it'
            " takes 'after' or none."
        )
      after = self.kwargs.get('after', '</think>')
      if not isinstance(after, str) or not after:
        raise ValueError(
            f"'after' of reward {self.function!r} is {after!r}; it must be a"
            " text, such as '</think>'."
        )
      return
    if set(self.kwargs) != {'pattern'}:
      raise ValueError(
          f"reward 'format' has kwargs {sorted(self.kwargs)}; it takes exactly"
          " ['pattern']."
      )
    try:
      re.compile(self.kwargs['pattern'])
    except (re.error, TypeError) as error:
      raise ValueError(
          f"the pattern of reward 'format', {self.kwargs['pattern']!r}, is"
          f' not a regular expression: {error}'
      ) from error

  @property
  def label(self) -> str:
    """The term's name among `RewardResult.parts`."""
    return re.split(r'[.:]', self.function)[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardRequest:
  """One answer to be scored.

  Attributes:
    prompt_text: what was tokenised.
    response_text: the model's text. Nothing in it is trusted.
    answer: the reference answer: a text or a number, or the row's JSON value
      for custom functions.
    source: name of the data set.
    extra: the row's columns (`Prompt.extra`), for custom functions.
    response_ids: token ids of the response, the end token included; for custom
      functions with TRL's `completion_ids`.
  """

  prompt_text: str
  response_text: str
  answer: Any
  source: str
  extra: dict[str, Any]
  response_ids: Sequence[int] = ()

  def __post_init__(self):
    """Refuses what is no text."""
    for name in ('prompt_text', 'response_text'):
      value = getattr(self, name)
      if not isinstance(value, str):
        raise ValueError(f'{name} is {value!r}; it must be a text')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """What one term says of one answer.

  Attributes:
    value: before the weight; None where the term does not apply.
    accuracy: in [0, 1]; None where the term does not judge the answer.
    prediction: the final answer as text, '' if the term reads none.
    error: None, 'refused' or 'failed', see `RewardResult.error`.
  """

  value: float | None
  accuracy: float | None
  prediction: str
  error: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardResult:
  """What one answer is worth.

  Attributes:
    score: sum over the terms that apply of weight * part; None where none
      does, and the answer then counts nowhere.
    accuracy: whether the answer is right, in [0, 1]: that of the first term
      that knows ('math', 'gsm8k', 'last_number', a custom function's 'acc'),
      else the part of the first term that applies; None where none does.
    parts: unweighted value by label; a term that did not apply (TRL's None)
      is absent.
    prediction: the final answer as text, for majority votes; '' if none.
    error: None, or why the answer counts 0: 'timeout', 'crash', 'memory'
      (limits of the worker), 'refused' (an answer no verifier is given) or
      'failed' (`math` raised, a defect of this library).
  """

  score: float | None
  accuracy: float | None
  parts: dict[str, float]
  prediction: str
  error: str | None


class RewardFunctionError(ValueError):
  """A user's reward function could not be loaded, or raised."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
  """From answers to scores.

  Attributes:
    functions: terms of the score: 'math', 'gsm8k', 'last_number', 'format',
      or 'package.module.function' / 'file.py:function' with verl's or TRL's
      signature.
    weights: factor of each term in the sum that is the score; the default is 1
      for every term.
    kwargs: keyword arguments by term, as JSON: ('', '{"pattern": "..."}'); the
      default is none for every term.
    num_workers: processes that score at the same time.
    timeout_s: wall seconds per answer; the worker is killed past it.
    memory_limit_mb: address space that an answer may add, in MiB.
  """

  functions: tuple[str, ...] = ('math',)
  weights: tuple[float, ...] = (1.0,)
  kwargs: tuple[str, ...] = ('',)
  num_workers: int = 2
  timeout_s: float = 5.0
  memory_limit_mb: int = 2048

  @property
  def limits(self) -> dict[str, Any]:
    """The arguments of `RewardPool` besides the terms of the score."""
    names = 'num_workers', 'timeout_s', 'memory_limit_mb'
    return {name: getattr(self, name) for name in names}
