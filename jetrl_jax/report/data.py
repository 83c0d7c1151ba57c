"""What a run left in its workdir, read for the report.

Reading is forgiving where a run may be killed (a torn last line, files that
are not there yet: a note says so) and strict where something is damaged.
"""

import collections
import dataclasses
import json
import math
import pathlib
import re
from typing import Any

import numpy as np

OPERANDS = ('input', 'kernel', 'output_grad')
MEASURES = ('saturated_frac', 'flushed_frac', 'sqnr_db')
_HEALTH = 'fp8_health'
_CHANGED = 'fp8_changed_weight_bytes'
_HEALTH_KEYS = [(o, m) for o in OPERANDS for m in MEASURES]
_HEALTH_KEYS.append(('kernel', 'changed'))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
  """One metric.

  Attributes:
    steps: int64 [n], those whose lines have the metric.
    values: float64 [n]; NaN where the value was not finite.
  """

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
    samples: step -> held-out samples; the first and the last evaluation.
    checkpoints: steps that have a folder.
    nonfinite: metric -> lines in which it was not finite.
    notes: sentences on what is missing or was dropped.
    chosen: dots that the cold start put into high precision, with their dB.
  """

  name: str
  folder: pathlib.Path
  steps: np.ndarray
  series: dict[str, Series]
  health: Health | None
  config: dict[str, Any]
  starts: list[dict]
  samples: dict[int, list[dict]]
  checkpoints: list[int]
  nonfinite: dict[str, int]
  notes: list[str]
  chosen: dict[str, float] = dataclasses.field(default_factory=dict)

  def get(self, metric: str) -> Series | None:
    """Returns a metric, None where no line has it."""
    return self.series.get(metric)

  def last(self, metric: str) -> float | None:
    """Returns the newest finite value of a metric."""
    found = self.finite(metric)
    return float(found[-1]) if found.size else None

  def finite(self, metric: str) -> np.ndarray:
    """Returns the finite values of a metric; empty where no line has it."""
    if metric not in self.series:
      return np.zeros(0)
    values = self.series[metric].values
    return values[np.isfinite(values)]


def read_run(folder: pathlib.Path, name: str) -> Run:
  """Reads a workdir.

  Args:
    folder: of a run that goes on, was stopped or is finished.
    name: see `Run`.

  Raises:
    ValueError: there is no such folder, no metrics.jsonl in it, nothing in
      that, or a line other than the last one is damaged.
  """
  notes: list[str] = []
  lines = _read_lines(folder, notes)
  starts = _read_objects(folder / 'starts.jsonl', notes)
  if not starts:
    notes.append('No starts.jsonl: versions and device are not known.')
  return Run(
      name=name,
      folder=folder,
      steps=np.asarray([line['step'] for line in lines], np.int64),
      series=_series(lines),
      health=_health(lines),
      config=_config(folder / 'config.json', notes),
      starts=starts,
      samples=_samples(folder / 'samples', int(lines[-1]['step']), notes),
      checkpoints=_checkpoints(folder / 'checkpoints'),
      nonfinite=collections.Counter(
          str(metric) for line in lines for metric in _list(line, 'nonfinite')
      ),
      notes=notes,
      chosen=_chosen(folder / 'precision.json', notes),
  )


def names(folders: list[pathlib.Path]) -> list[str]:
  """Returns the shortest ends of the paths that tell all of them apart.

  Raises:
    ValueError: a folder is given twice.
  """
  parts = [folder.resolve().parts for folder in folders]
  for i, one in enumerate(parts):
    if one in parts[:i]:
      raise ValueError(f'{folders[i]} is given twice; a comparison needs two')
  for length in range(1, max(map(len, parts)) + 1):
    ends = ['/'.join(p[-length:]) for p in parts]
    if len(set(ends)) == len(ends):
      return ends
  return ['/'.join(p) for p in parts]


def _read_lines(folder: pathlib.Path, notes: list[str]) -> list[dict]:
  """Returns the lines of metrics.jsonl, checked."""
  path = folder / 'metrics.jsonl'
  if not folder.is_dir():
    raise ValueError(f'{folder}: there is no such folder')
  if not path.is_file():
    held = sorted(p.name for p in folder.iterdir())[:5]
    raise ValueError(
        f'{folder} holds no metrics.jsonl (but {held or "nothing"}); name the'
        ' --workdir of a run'
    )
  lines: list[dict] = []
  damaged = ''
  with open(path, 'rb') as file:
    for number, content in enumerate(file, start=1):
      if damaged:  # And it was not the last one.
        raise ValueError(damaged)
      line = _line(content)
      if line is None:
        damaged = (
            f'{path} line {number} is no metrics line: {content[:60]!r}; mend'
            ' it or take it out'
        )
        continue
      if lines and line['step'] <= lines[-1]['step']:
        raise ValueError(
            f'{path} line {number}: step {line["step"]} does not follow step'
            f' {lines[-1]["step"]}; the lines of two runs are mixed'
        )
      lines.append(line)
  if damaged:
    notes.append(
        'The last line of metrics.jsonl is half-written and left out: the run'
        ' was killed there, or is writing it.'
    )
  if not lines:
    raise ValueError(f'{path} is empty: the run has not logged a step yet')
  return lines


def _line(content: bytes) -> dict | None:
  """Returns a line of metrics.jsonl, its health made small; None if damaged."""
  line = _parse(content)
  step = line.get('step') if isinstance(line, dict) else None
  # Above 2^53 a browser's numbers are not exact.
  if not isinstance(step, int) or isinstance(step, bool) or step >= 2**53:
    return None
  changed = _dict(line.pop(_CHANGED, None))
  health = _dict(line.pop(_HEALTH, None))
  # As dicts these are the file's bulk: gigabytes for a long run of a large
  # model.
  line[_HEALTH] = {
      dot: _health_row(_dict(operands), changed.get(dot))
      for dot, operands in health.items()
  }
  return line


def _health_row(operands: dict, changed: Any) -> np.ndarray:
  """Returns float32 values in the order of `_HEALTH_KEYS`, NaN where absent."""
  values = [
      changed
      if measure == 'changed'
      else _dict(operands.get(operand)).get(measure)
      for operand, measure in _HEALTH_KEYS
  ]
  numbers = [_number(value) for value in values]
  return np.asarray([np.nan if n is None else n for n in numbers], np.float32)


def _parse(content: bytes) -> Any:
  try:
    return json.loads(content)
  # A number of thousands of digits, or brackets without end.
  except (ValueError, RecursionError):
    return None


def _list(line: dict, name: str) -> list:
  found = line.get(name)
  return found if isinstance(found, list) else []


def _dict(value: Any) -> dict:
  return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
  """Returns a float, NaN for what is not finite; None for no number."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return None
  try:
    value = float(value)
  except OverflowError:
    return float('nan')
  return value if math.isfinite(value) else math.nan


def _series(lines: list[dict]) -> dict[str, Series]:
  found: dict[str, tuple[list[int], list[float]]] = {}
  for line in lines:
    for name, value in line.items():
      # The writer's null: the metric was there and not finite.
      number = float('nan') if value is None else _number(value)
      if number is not None and name != 'step':
        steps, values = found.setdefault(name, ([], []))
        steps.append(line['step'])
        values.append(number)
  return {
      name: Series(
          steps=np.asarray(steps, np.int64),
          values=np.asarray(values, np.float64),
      )
      for name, (steps, values) in found.items()
  }


def layer_and_kind(dot: str) -> tuple[int, str]:
  """Splits 'layers_3/attn/qkv' into (3, 'attn/qkv'); -1 for no layer."""
  match = re.fullmatch(r'layers_(\d{1,6})/(.+)', dot)
  return (int(match[1]), match[2]) if match else (-1, dot)


def _health(lines: list[dict]) -> Health | None:
  kept = [line for line in lines if line[_HEALTH]]
  dots = sorted(
      {dot for line in kept for dot in line[_HEALTH]}, key=layer_and_kind
  )
  if not dots:
    return None
  row = {dot: i for i, dot in enumerate(dots)}
  values = np.full(
      (len(_HEALTH_KEYS), len(dots), len(kept)), np.nan, np.float32
  )
  for column, line in enumerate(kept):
    for dot, numbers in line[_HEALTH].items():
      values[:, row[dot], column] = numbers
  return Health(
      dots=dots,
      steps=np.asarray([line['step'] for line in kept], np.int64),
      values=dict(zip(_HEALTH_KEYS, values, strict=True)),
  )


def _config(path: pathlib.Path, notes: list[str]) -> dict[str, Any]:
  if not path.is_file():
    notes.append('No config.json.')
    return {}
  config = _parse(path.read_bytes())
  if not isinstance(config, dict):
    notes.append('config.json is damaged and left out.')
    return {}
  flat: dict[str, Any] = {}

  def walk(section: dict, path: str) -> None:
    for key, value in section.items():
      if isinstance(value, dict) and value:
        walk(value, f'{path}{key}.')
      else:
        flat[f'{path}{key}'] = value

  walk(config, '')
  return flat


def _chosen(path: pathlib.Path, notes: list[str]) -> dict[str, float]:
  """Returns the dots that min_sqnr_db chose, see `rl/run/precision.py`."""
  if not path.is_file():
    return {}
  chosen = _dict(_parse(path.read_bytes())).get('high_precision')
  if not isinstance(chosen, dict) or None in map(_number, chosen.values()):
    notes.append('precision.json is damaged and left out.')
    return {}
  return chosen


def _read_objects(path: pathlib.Path, notes: list[str]) -> list[dict]:
  """Returns the objects of a JSON-lines file, damaged lines left out."""
  if not path.is_file():
    return []
  raw = path.read_bytes().splitlines()
  lines = [_parse(line) for line in raw if line.strip()]
  good = [line for line in lines if isinstance(line, dict)]
  if len(good) < len(lines):
    notes.append(
        f'{len(lines) - len(good)} damaged lines of {path.name} are left out.'
    )
  return good


def _samples(
    folder: pathlib.Path, last_step: int, notes: list[str]
) -> dict[int, list[dict]]:
  """Reads the samples of the first and the last evaluation."""
  found = sorted(folder.glob('*.jsonl')) if folder.is_dir() else []
  steps = {int(p.stem): p for p in found if re.fullmatch('[0-9]+', p.stem)}
  steps = {step: path for step, path in steps.items() if step <= last_step}
  ends = sorted({min(steps), max(steps)}) if steps else []
  return {step: _read_objects(steps[step], notes) for step in ends}


def _checkpoints(folder: pathlib.Path) -> list[int]:
  if not folder.is_dir():
    return []
  names = [path.name for path in folder.iterdir() if path.is_dir()]
  return sorted(int(name) for name in names if re.fullmatch('[0-9]+', name))
