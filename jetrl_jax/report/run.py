"""What a run left in its workdir, read for the report.

Reading is forgiving where a run may be killed (a torn last line, files that
are not there yet: a note says so) and strict where something is damaged.
"""

import collections
import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jetrl_jax.config import sections

METRICS = 'metrics.jsonl'
OPERANDS = ('input', 'kernel', 'output_grad')
_HEALTH, _CHANGED = 'fp8_health', 'fp8_changed_weight_bytes'
MEASURES = ('saturated_frac', 'flushed_frac', 'sqnr_db')
_HEALTH_KEYS = [(o, m) for o in OPERANDS for m in MEASURES]
_HEALTH_KEYS.append(('kernel', 'changed'))
# How many levels below a folder its runs may be.
_DEPTH = 4


class Series(NamedTuple):
  """A metric: int64 [n] and float64 [n], NaN where it was not finite."""

  steps: np.ndarray
  values: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Health:
  """FP8 health by dot and step.

  Attributes:
    dots: paths such as 'layers_0/attn/qkv', in the order of their layers.
    steps: int64 [n].
    values: (operand, measure) -> float32 [dots, n], NaN where absent.
  """

  dots: list[str]
  steps: np.ndarray
  values: dict[tuple[str, str], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """One workdir.

  Attributes:
    name: what tells it apart from the other runs of a report.
    folder: the workdir.
    steps: int64 [n], every line's step.
    series: metric -> its values.
    health: None without FP8.
    config: dotted name -> value; empty where config.json is missing.
    starts: lines of starts.jsonl.
    nonfinite: metric -> lines in which it was not finite.
    notes: sentences on what is missing or was left out.
    chosen: dots that the cold start put into high precision, with their dB.
  """

  name: str
  folder: pathlib.Path
  steps: np.ndarray
  series: dict[str, Series]
  health: Health | None
  config: dict[str, Any]
  starts: list[dict]
  nonfinite: dict[str, int]
  notes: list[str]
  chosen: dict[str, float]

  def finite(self, metric: str) -> np.ndarray:
    """Returns the finite values of a metric; empty where no line has it."""
    values = (
        self.series[metric].values if metric in self.series else np.zeros(0)
    )
    return values[np.isfinite(values)]

  def last(self, metric: str) -> float | None:
    """Returns the newest finite value of a metric."""
    found = self.finite(metric)
    return float(found[-1]) if found.size else None

  @property
  def is_finished(self) -> bool:
    """Whether the last step of the config is there."""
    total = self.config.get('trainer.total_training_steps')
    return isinstance(total, int) and int(self.steps[-1]) >= total

  def by_step(self, pattern: str) -> dict[int, pathlib.Path]:
    """Returns the files named by their steps, 'rollouts/*.npz', in order."""
    ending = pathlib.PurePath(pattern).suffix
    found = {p.name.removesuffix(ending): p for p in self.folder.glob(pattern)}
    steps = {int(n): p for n, p in found.items() if re.fullmatch('[0-9]+', n)}
    return dict(sorted(steps.items()))


def read_run(folder: pathlib.Path, name: str) -> Run:
  """Reads a workdir.

  Args:
    folder: the folder of a run that goes on, was stopped or is finished.
    name: see `Run`.

  Raises:
    ValueError: there is no such folder, no metrics.jsonl in it, nothing in
      that, or a line other than the last one is damaged.
  """
  notes: list[str] = []
  lines = list(_read_lines(folder, notes))
  if not lines:
    path = folder / METRICS
    found = 'has no metrics line' if path.stat().st_size else 'is empty'
    raise ValueError(f'{path} {found}: the run has not logged a step yet')
  starts = read_objects(folder / 'starts.jsonl', notes)
  if not starts:
    notes.append('No starts.jsonl: versions and device are not known.')
  steps = np.asarray([line['step'] for line in lines], np.int64)
  series = _series(lines)
  if 'sft/loss' not in series:  # A warm start logs every tenth step.
    notes += _lost_lines(steps.tolist())
  nonfinite = collections.Counter[str]()
  for line in lines:
    names_in = line.get('nonfinite')
    nonfinite.update(map(str, names_in if isinstance(names_in, list) else []))
  return Run(
      name=name,
      folder=folder,
      steps=steps,
      series=series,
      health=_health(lines),
      config=_flat(_read_json(folder / 'config.json', notes)),
      starts=starts,
      nonfinite=nonfinite,
      notes=notes,
      chosen=_chosen(folder / 'precision.json', notes),
  )


def find_runs(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the workdirs below a folder; none below one that is a workdir."""
  found = []
  for path, below, files in os.walk(folder):
    depth = len(pathlib.Path(path).relative_to(folder).parts)
    if METRICS in files and depth:
      found.append(pathlib.Path(path))
    if METRICS in files or depth == _DEPTH:
      below.clear()
  return sorted(found)


def names(folders: list[pathlib.Path]) -> list[str]:
  """Returns the ends of the paths that tell all of them apart.

  Raises:
    ValueError: a folder is given twice.
  """
  paths = [folder.resolve() for folder in folders]
  for i, path in enumerate(paths):
    if path in paths[:i]:
      raise ValueError(f'{folders[i]} is given twice; a comparison needs two')
  above = os.path.commonpath([path.parent for path in paths])
  return [path.relative_to(above).as_posix() for path in paths]


def _read_lines(folder: pathlib.Path, notes: list[str]) -> Iterator[dict]:
  """Yields the lines of metrics.jsonl, checked."""
  path = folder / METRICS
  if folder.is_file():
    raise ValueError(f'{folder} is a file; name the folder of a run')
  if not folder.is_dir():
    raise ValueError(f'{folder}: there is no such folder')
  if not path.is_file():
    held = sorted(p.name for p in folder.iterdir())[:5]
    raise ValueError(
        f'{folder} holds no {METRICS} (but {held or "nothing"}); name the'
        ' --workdir of a run, or one folder of runs'
    )
  step, damaged = -(2**53), ''
  with open(path, 'rb') as file:
    for number, content in enumerate(file, start=1):
      if damaged:  # It was not the last line.
        raise ValueError(damaged)
      line = _line(content)
      if line is None:
        damaged = (
            f'{path} line {number} is no metrics line: {content[:60]!r}; mend'
            ' it or take it out'
        )
      elif line['step'] <= step:
        raise ValueError(
            f'{path} line {number}: step {line["step"]} does not follow step'
            f' {step}; the lines of two runs are mixed'
        )
      else:
        step = line['step']
        yield line
  if damaged:
    notes.append(
        f'The last line of {METRICS} is half-written and left out: the run was'
        ' killed there, or is writing it.'
    )


def _lost_lines(steps: list[int]) -> Iterator[str]:
  """Says what a file that was emptied or cut does not hold."""
  if steps[0] > 1:
    yield f'{METRICS} begins at step {steps[0]}: earlier lines are lost.'
  for one, two in zip(steps, steps[1:], strict=False):
    if two > one + 1:
      yield f'{METRICS} has no lines between step {one} and step {two}.'
      break


def _line(content: bytes) -> dict | None:
  """Returns a line of metrics.jsonl, its health made small; None if damaged."""
  line = _parse(content)
  step = line.get('step') if isinstance(line, dict) else None
  # Above 2^53 a browser's numbers are not exact.
  if not isinstance(step, int) or isinstance(step, bool) or abs(step) >= 2**53:
    return None
  changed, health = _dict(line.pop(_CHANGED, 0)), _dict(line.pop(_HEALTH, 0))
  # These are most of the file. As dicts they would be gigabytes for a long run
  # of a large model.
  line[_HEALTH] = {
      dot: _health_row(_dict(operands), changed.get(dot))
      for dot, operands in health.items()
  }
  return line


def _health_row(operands: dict, changed: Any) -> np.ndarray:
  """Returns float32 values in the order of `_HEALTH_KEYS`, NaN where absent."""
  values = [_dict(operands.get(o)).get(m) for o, m in _HEALTH_KEYS[:-1]]
  numbers = [_number(value) for value in (*values, changed)]
  return np.asarray([np.nan if n is None else n for n in numbers], np.float32)


def _parse(content: bytes) -> Any:
  try:
    return json.loads(content)
  # A number of thousands of digits, or brackets without end.
  except (ValueError, RecursionError):
    return None


def _dict(value: Any) -> dict:
  return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
  """Returns a float, NaN if it is not finite; None if it is no number."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return None
  try:
    value = float(value)
  except OverflowError:
    return math.nan
  return value if math.isfinite(value) else math.nan


def _series(lines: list[dict]) -> dict[str, Series]:
  found: dict[str, list[tuple[int, float]]] = {}
  for line in lines:
    for name, value in line.items():
      # The writer's null: the metric was there and not finite.
      number = math.nan if value is None else _number(value)
      if number is not None and name != 'step':
        found.setdefault(name, []).append((line['step'], number))
  return {
      name: Series(
          np.asarray([s for s, _ in pairs]), np.asarray([v for _, v in pairs])
      )
      for name, pairs in found.items()
  }


def layer_and_kind(dot: str) -> tuple[int, str]:
  """Splits 'layers_3/attn/qkv' into (3, 'attn/qkv'); -1 for no layer."""
  match = re.fullmatch(r'layers_(\d{1,6})/(.+)', dot)
  return (int(match[1]), match[2]) if match else (-1, dot)


def _health(lines: list[dict]) -> Health | None:
  kept = [line for line in lines if line[_HEALTH]]
  dots = {dot: 0 for line in kept for dot in line[_HEALTH]}
  if not dots:
    return None
  dots = {dot: i for i, dot in enumerate(sorted(dots, key=layer_and_kind))}
  shape = len(_HEALTH_KEYS), len(dots), len(kept)
  values = np.full(shape, np.nan, np.float32)
  for column, line in enumerate(kept):
    for dot, numbers in line[_HEALTH].items():
      values[:, dots[dot], column] = numbers
  return Health(
      dots=list(dots),
      steps=np.asarray([line['step'] for line in kept], np.int64),
      values=dict(zip(_HEALTH_KEYS, values, strict=True)),
  )


def _read_json(path: pathlib.Path, notes: list[str]) -> dict[str, Any]:
  if not path.is_file():
    notes.append(f'No {path.name}.')
    return {}
  content = _parse(path.read_bytes())
  if not isinstance(content, dict):
    notes.append(f'{path.name} is damaged and left out.')
  return _dict(content)


def _flat(section: dict, path: str = '') -> dict[str, Any]:
  """Returns dotted name -> value of nested sections."""
  flat: dict[str, Any] = {}
  for key, value in section.items():
    if isinstance(value, dict) and value:
      flat |= _flat(value, f'{path}{key}.')
    else:
      flat[f'{path}{key}'] = value
  return flat


def default_config() -> dict[str, Any]:
  """Returns dotted name -> default."""
  # Through JSON, as a run's own values went: tuples are lists there.
  return _flat(json.loads(sections.get_config().to_json()))


def _chosen(path: pathlib.Path, notes: list[str]) -> dict[str, float]:
  """Returns the dots that min_sqnr_db chose, see `rl/run/precision.py`."""
  if not path.is_file():
    return {}
  chosen = _dict(_parse(path.read_bytes())).get('high_precision')
  if not isinstance(chosen, dict) or None in map(_number, chosen.values()):
    notes.append(f'{path.name} is damaged and left out.')
    return {}
  return chosen


def read_objects(path: pathlib.Path, notes: list[str]) -> list[dict]:
  """Returns the objects of a JSON-lines file; a note counts damaged lines."""
  raw = path.read_bytes().split(b'\n') if path.is_file() else []
  lines = [_parse(line) for line in raw if line.strip()]
  good = [line for line in lines if isinstance(line, dict)]
  if bad := len(lines) - len(good):
    notes.append(f'{bad} damaged lines of {path.name} are left out.')
  return good
