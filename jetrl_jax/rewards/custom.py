"""A user's own reward function, with verl's or TRL's arguments.

Which of the two a function is follows from its parameters' names:

    verl: compute_score(data_source, solution_str, ground_truth, extra_info)
          -> number, or a dict with 'score' (and 'acc', 'pred')
    TRL:  reward_func(prompts, completions, **columns) -> [number or None]

A TRL function is called with lists of one: each answer is bounded by itself.
One that compares the completions of a group with each other does not fit.
"""

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import math
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jetrl_jax.rewards.types import (
    Part,
    RewardFunctionError,
    RewardRequest,
    RewardSpec,
)


def load_custom(spec: RewardSpec) -> Callable[[RewardRequest], Part]:
  """Loads the function of `spec` and adapts its arguments and result.

  Raises:
    RewardFunctionError: no such file, module or function, or its parameters
      are neither verl's nor TRL's.
  """
  function = _load(spec.function)
  parameters = inspect.signature(function).parameters
  if 'completions' in parameters:
    arguments, unpack = _trl_arguments, _first
  elif {'solution_str', 'ground_truth'} <= set(parameters):
    arguments, unpack = _verl_arguments, _itself
  else:
    raise RewardFunctionError(
        f'reward {spec.function!r} has the parameters {list(parameters)};'
        " allowed: verl's (data_source, solution_str, ground_truth,"
        " extra_info) or TRL's (prompts, completions, **kwargs)."
    )
  takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  unknown = [name for name in spec.kwargs if name not in parameters]
  if unknown and not takes_any:
    raise RewardFunctionError(
        f'reward {spec.function!r} is given {unknown} (kwargs); it has the'
        f' parameters {list(parameters)}.'
    )

  def term(request: RewardRequest) -> Part:
    given = {**arguments(request), **spec.kwargs}
    if not takes_any:
      given = {k: v for k, v in given.items() if k in parameters}
    value = function(**given)
    if inspect.isawaitable(value):
      value = asyncio.run(_wait(value))
    return _to_part(unpack(value, spec.function), spec.function)

  return term


async def _wait(value: Any) -> Any:
  return await value


def _load(target: str) -> Callable[..., Any]:
  """Imports 'package.module.function' or 'path/to/file.py:function'."""
  where, name = target.rsplit(':' if ':' in target else '.', 1)
  where = os.path.expanduser(where)
  is_file = where.endswith('.py')
  if is_file and not pathlib.Path(where).is_file():
    raise RewardFunctionError(
        f'reward {target!r}: there is no file {pathlib.Path(where).absolute()}.'
    )
  try:
    load = _import_file if is_file else importlib.import_module
    module = load(where)
  except Exception as error:
    message = (
        f'reward {target!r}: importing {where!r} failed with'
        f' {type(error).__name__}: {error}'
    )
    if isinstance(error, ModuleNotFoundError) and _is_above(error.name, where):
      # Nothing of the user's has run.
      raise RewardFunctionError(message) from None
    raise RewardFunctionError(message) from error
  if not callable(vars(module).get(name)):
    functions = sorted(k for k, v in vars(module).items() if callable(v))
    raise RewardFunctionError(
        f'reward {target!r}: {where!r} has no function {name!r}; it has'
        f' {functions}.'
    )
  return vars(module)[name]


def _is_above(package: str | None, module: str) -> bool:
  return f'{module}.'.startswith(f'{package}.')


def _import_file(path: str) -> Any:
  # The path is part of the name: two files may both be called reward.py.
  digest = hashlib.sha256(path.encode()).hexdigest()[:8]
  name = f'{pathlib.Path(path).stem}_{digest}'
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  spec.loader.exec_module(module)
  return module


def _verl_arguments(request: RewardRequest) -> dict[str, Any]:
  return {
      'data_source': request.source,
      'solution_str': request.response_text,
      'ground_truth': request.answer,
      # verl's rows have a column of this name; in others all columns are it.
      'extra_info': request.extra.get('extra_info', request.extra),
  }


def _trl_arguments(request: RewardRequest) -> dict[str, Any]:
  prompt = request.extra.get('prompt', request.prompt_text)
  completion: Any = request.response_text
  if isinstance(prompt, list):
    completion = [{'role': 'assistant', 'content': completion}]
  columns = {'answer': request.answer, **request.extra}
  return {
      **{name: [value] for name, value in columns.items() if name != 'prompt'},
      'prompts': [prompt],
      'completions': [completion],
  }


def _itself(value: Any, target: str) -> Any:
  """A verl function answers with the score; without a `return`, with None."""
  return _number(value, target) if value is None else value


def _first(value: Any, target: str) -> Any:
  """A TRL function answers with one number per completion."""
  try:
    iterator = iter(value)
  except TypeError:
    raise RewardFunctionError(
        f'reward {target!r} returned {_shown(value)}; a function of completions'
        ' must return a list with a number for each.'
    ) from None
  values = list(iterator)  # What a generator raises is the user's own.
  if len(values) != 1:
    raise RewardFunctionError(
        f'reward {target!r} returned {len(values)} values for 1 completion.'
    )
  return values[0]


def _to_part(value: Any, target: str) -> Part:
  """Reads the result of either kind; None is TRL's 'does not apply'."""
  accuracy = None
  prediction = ''
  if value is None:
    return Part(value=None, accuracy=None, prediction='', error=None)
  if isinstance(value, Mapping):
    if 'score' not in value:
      raise RewardFunctionError(
          f"reward {target!r} returned a dict without 'score': {list(value)}."
      )
    accuracy = _number(value['acc'], target) if 'acc' in value else None
    found = value.get('pred')
    # 0 and False are answers, too.
    prediction = '' if found is None else str(found)
    # Half of a surrogate pair, as json.loads may find in an answer, could not
    # be written to a file.
    prediction = prediction.encode('utf-8', 'replace').decode()
    value = value['score']
  elif isinstance(value, (list, tuple)):
    value = value[0]  # As verl reads it: (score, ...).
  return Part(
      value=_number(value, target),
      accuracy=accuracy,
      prediction=prediction,
      error=None,
  )


def _number(value: Any, target: str) -> float:
  """Returns a finite float."""
  try:
    number = float(value)
  except (TypeError, ValueError, OverflowError):
    number = math.nan
  if not math.isfinite(number):
    raise RewardFunctionError(
        f'reward {target!r} returned {_shown(value)}; a score must be a finite'
        ' number: return 0.0 for an answer that cannot be judged (where a term'
        " does not apply, a function with TRL's arguments may return [None])."
    )
  return number


def _shown(value: Any) -> str:
  """Returns a value's text, cut where it is long."""
  try:
    text = repr(value)
  except ValueError:  # Python writes no int of more than 4,300 digits.
    text = f'a number too large to write ({type(value).__name__})'
  return text if len(text) <= 80 else text[:77] + '...'
