"""A user's own reward function, with verl's or TRL's arguments.

Which of the two a function is follows from its parameters' names:

    verl: compute_score(data_source, solution_str, ground_truth, extra_info)
          -> number, or a dict with 'score' (and 'acc', 'pred')
    TRL:  reward_func(prompts, completions, completion_ids, **columns)
          -> [number or None]

TRL's columns are those of the row, as they are; `ground_truth` and `answer`
are the reference answer where the row has no column of that name.

A TRL function is called with lists of one: each answer is bounded by itself.
One that compares the completions of a group with each other does not fit.
"""

import asyncio
import hashlib
import importlib
import inspect
import math
import os
import pathlib
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from jetrl_jax.core import files
from jetrl_jax.rewards.types import (
    MAX_SIZE,
    Columns,
    Part,
    RewardFunctionError,
    RewardRequest,
    RewardSpec,
)

# Most characters of a user's message, of a traceback and of a prediction.
_MAX_SHOWN = 300
_MAX_LINES = 10_000
_MAX_PREDICTION = 1000
_VERL = ('data_source', 'solution_str', 'ground_truth', 'extra_info')
_ALLOWED = (
    "verl's (data_source, solution_str, ground_truth, extra_info) or TRL's"
    ' (prompts, completions, completion_ids, **kwargs).'
)
# Arguments that TRL's trainer also passes.
_TRL_ONLY = ('trainer_state', 'log_extra', 'log_metric', 'environments')


def load_custom(
    spec: RewardSpec, columns: Columns = ()
) -> Callable[[RewardRequest], Part]:
  """Loads the function of `spec` and adapts its arguments and result.

  Args:
    spec: the term.
    columns: those of the rows that it will score, as far as they are known.

  Raises:
    RewardFunctionError: no such file, module or function, its parameters are
      neither verl's nor TRL's, it needs one that nobody gives, or a column that
      rows lack.
  """
  function = _load(spec.function)
  parameters = inspect.signature(function).parameters
  is_trl = not {'completions', 'completion_ids'}.isdisjoint(parameters)
  if is_trl:
    arguments, unpack = _trl_arguments, _first
  elif {'solution_str', 'ground_truth'} <= set(parameters):
    arguments, unpack = _verl_arguments, _itself
  else:
    raise RewardFunctionError(
        f'reward {spec.function!r} has the parameters {list(parameters)};'
        f' allowed: {_ALLOWED}'
    )
  takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  unknown = [name for name in spec.kwargs if name not in parameters]
  if unknown and not takes_any:
    raise RewardFunctionError(
        f'reward {spec.function!r} is given {unknown} (kwargs); it has the'
        f' parameters {list(parameters)}.'
    )
  needed = _needed(spec, parameters, is_trl=is_trl)
  if is_trl and 'solution_str' in needed and 'solution_str' not in spec.kwargs:
    # No column has this name: verl's own text of the answer is meant.
    raise RewardFunctionError(
        f'reward {spec.function!r} has the parameters {list(parameters)}:'
        " solution_str is verl's, and completions and completion_ids are"
        f" TRL's; allowed: {_ALLOWED}"
    )

  def given_for(request: RewardRequest) -> dict[str, Any]:
    given = {**arguments(request), **spec.kwargs}
    missing = [name for name in needed if name not in given]
    if missing:
      raise RewardFunctionError(
          f'reward {spec.function!r} needs {missing}, and a row of'
          f' {request.source!r} has the columns {sorted(request.extra)}.'
      )
    return given

  for source, names in columns:
    given_for(
        RewardRequest(
            prompt_text='',
            response_text='',
            answer='',
            source=source,
            extra=dict.fromkeys(names),
        )
    )

  def term(request: RewardRequest) -> Part:
    given = given_for(request)
    if not takes_any:
      given = {k: v for k, v in given.items() if k in parameters}
    try:
      value = function(**given)
      if inspect.isawaitable(value):
        value = asyncio.run(_wait(value))
      value = unpack(value, spec.function)
    except (RewardFunctionError, MemoryError):
      raise
    except BaseException as error:
      # SystemExit too: a function that exits is as broken as one that raises.
      raise RewardFunctionError(
          f'reward {spec.function!r} raised {_described(error)}, for an answer'
          f' to a prompt of {request.source!r}:\n{_own_lines(error)}'
      ) from error
    return _to_part(value, spec.function)

  return term


def _needed(
    spec: RewardSpec,
    parameters: Mapping[str, inspect.Parameter],
    *,
    is_trl: bool,
) -> list[str]:
  """Returns the parameters without a default, if something can be given."""
  needed = [
      p.name
      for p in parameters.values()
      if p.default is p.empty
      and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
  ]
  # What else TRL's function needs are columns: the rows have them or not.
  given = {*spec.kwargs, *(() if is_trl else _VERL)}
  absent = [
      name
      for name in needed
      if name not in given and (name in _TRL_ONLY or not is_trl)
  ]
  if absent:
    raise RewardFunctionError(
        f'reward {spec.function!r} needs {absent}, which rewards are not given'
        ' here; give the parameters defaults, or values by reward.kwargs.'
    )
  return needed


async def _wait(value: Any) -> Any:
  return await value


def _load(target: str) -> Callable[..., Any]:
  """Imports 'package.module.function' or 'path/to/file.py:function'."""
  if target.endswith('.py'):
    raise RewardFunctionError(
        f'reward {target!r} names a file and no function of it; write'
        f" '{target}:compute_score', or what yours is called."
    )
  where, name = target.rsplit(':' if ':' in target else '.', 1)
  where = os.path.expanduser(where)
  is_file = where.endswith('.py')
  if is_file and not pathlib.Path(where).is_file():
    raise RewardFunctionError(
        f'reward {target!r}: there is no file {pathlib.Path(where).absolute()}.'
    )
  try:
    load = files.import_file if is_file else importlib.import_module
    module = load(where)
    # Not vars(): packages like trl import a name when it is asked for.
    found = getattr(module, name, None)
  except BaseException as error:
    message = (
        f'reward {target!r}: importing {where!r} failed with'
        f' {_described(error)}'
    )
    if not isinstance(error, ModuleNotFoundError) or not _is_above(
        error.name, where
    ):
      # Keep only lines of the user's own code.
      message = f'{message}:\n{_own_lines(error)}'
    raise RewardFunctionError(message) from error
  if not callable(found):
    functions = sorted(
        {k for k, v in vars(module).items() if callable(v)}
        | set(vars(module).get('__all__', ()))
    )
    raise RewardFunctionError(
        f'reward {target!r}: {where!r} has no function {name!r}; it has'
        f' {functions or "none"}.'
    )
  return found


def _described(error: BaseException) -> str:
  """Returns 'KeyError: 1 at file.py:7', the innermost line of the user's."""
  said = traceback.format_exception_only(error)[-1].strip()
  said = said if len(said) <= _MAX_SHOWN else said[:_MAX_SHOWN] + '...'
  frames = _own_frames(traceback.extract_tb(error.__traceback__))
  return (
      f'{said} at {frames[-1].filename}:{frames[-1].lineno}' if frames else said
  )


def _own_lines(error: BaseException) -> str:
  """Returns the traceback without the frames that lead to the user's code."""
  shown = traceback.TracebackException.from_exception(error)
  part: traceback.TracebackException | None = shown
  while part is not None:
    part.stack = traceback.StackSummary.from_list(_own_frames(part.stack))
    part = part.__cause__ or part.__context__
  text = ''.join(shown.format()).rstrip()
  return text if len(text) <= _MAX_LINES else '...' + text[-_MAX_LINES:]


def _own_frames(
    stack: traceback.StackSummary,
) -> list[traceback.FrameSummary]:
  ours = (__file__, files.__file__, '<frozen importlib')
  return [frame for frame in stack if not frame.filename.startswith(ours)]


def _is_above(package: str | None, module: str) -> bool:
  return f'{module}.'.startswith(f'{package}.')


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
  # The row's own columns win, as in TRL: its `answer` may be a whole solution.
  ours = {'answer': request.answer, 'ground_truth': request.answer}
  columns = {**ours, **request.extra}
  return {
      **{name: [value] for name, value in columns.items() if name != 'prompt'},
      'prompts': [prompt],
      'completions': [completion],
      'completion_ids': [list(request.response_ids)],
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
  # An exception of a generator comes from the user's code.
  values = list(iterator)
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
    if accuracy is not None and not 0 <= accuracy <= 1:
      raise RewardFunctionError(
          f"reward {target!r} returned {_shown(value['acc'])} as 'acc'; an"
          " accuracy must be in [0, 1]: leave 'acc' out where there is none."
      )
    found = value.get('pred')
    # 0 and False are answers, too.
    prediction = '' if found is None else str(found)
    # json.loads may return half of a surrogate pair, which cannot be written to
    # a file.
    prediction = prediction.encode('utf-8', 'replace').decode()
    if len(prediction) > _MAX_PREDICTION:
      digest = hashlib.sha256(prediction.encode()).hexdigest()[:16]
      prediction = f'{prediction[:_MAX_PREDICTION]}... ({digest})'
    value = value['score']
  elif isinstance(value, (list, tuple)):
    value = value[0]  # As in verl: (score, ...).
  return Part(
      value=_number(value, target),
      accuracy=accuracy,
      prediction=prediction,
      error=None,
  )


def _number(value: Any, target: str) -> float:
  """Returns a finite float of a bounded size."""
  try:
    # float() would read a number from a text, which is a mistake of the
    # function.
    number = math.nan if isinstance(value, (str, bytes)) else float(value)
  except (TypeError, ValueError, OverflowError):
    number = math.nan
  if not math.isfinite(number):
    raise RewardFunctionError(
        f'reward {target!r} returned {_shown(value)}; a score must be a finite'
        ' number: return 0.0 for an answer that cannot be judged (where a term'
        " does not apply, a function with TRL's arguments may return [None])."
    )
  if abs(number) > MAX_SIZE:
    raise RewardFunctionError(
        f'reward {target!r} returned {_shown(value)}; allowed: numbers between'
        f' {-MAX_SIZE:g} and {MAX_SIZE:g}, whose squares can be computed with.'
    )
  return number


def _shown(value: Any) -> str:
  """Returns a value's text, cut where it is long."""
  try:
    text = repr(value)
  except ValueError:  # Python writes no int of more than 4,300 digits.
    text = f'a number too large to write ({type(value).__name__})'
  return text if len(text) <= 80 else text[:77] + '...'
