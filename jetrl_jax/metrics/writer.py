"""Averages as (sum, weight), and the log of a run's metrics.

Only `Mean.value` divides an average, when it is written. Until then sums and
weights only add, so micro-batches, masks and devices cannot change it.
`MetricWriter` appends one JSON object per step to `metrics.jsonl`. It can also
log the scalars to TensorBoard and Weights & Biases.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
import socket
import time
from typing import Any

import jax
import numpy as np
from absl import logging

from jetrl_jax.core.typing import Array
from jetrl_jax.metrics.wandb import WandbConfig, WandbRun

_RESERVED = ('step', 'nonfinite')
# The start of a line that `MetricWriter.write` writes.
_BEGIN = re.compile(rb'\{"step": (\d{1,18})[,}]')
# The seconds in the name of an `_EventFile`.
_EVENTS = re.compile(r'events\.out\.tfevents\.(\d+\.\d+)\.')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mean:
  """A weighted average that is not divided yet: value = sum / weight.

  Attributes:
    sum: sum of weight_i * x_i, scalar.
    weight: sum of weight_i, scalar, e.g. a number of tokens; 0 if there was
      nothing to average.
  """

  sum: Array | float
  weight: Array | float

  def __add__(self, other: 'Mean') -> 'Mean':
    """Returns the average over both."""
    return Mean(sum=self.sum + other.sum, weight=self.weight + other.weight)

  def value(self) -> float | None:
    """Returns the average as a Python float; None if the weight is 0."""
    weight = float(self.weight)
    return float(self.sum) / weight if weight else None


def mean(values: Array, weights: Array) -> Mean:
  """Returns Mean(sum(values * weights), sum(weights)).

  Args:
    values: values to average; ignored where the weight is 0, even a NaN.
    weights: weights of the same shape, >= 0; e.g. a loss mask.
  """
  # 0 * NaN is NaN, so masked values are replaced by 0.
  kept = jax.numpy.where(weights > 0, values, 0)
  return Mean(sum=(kept * weights).sum(), weight=weights.sum())


class MetricWriter:
  """Appends one JSON object per step to `<workdir>/metrics.jsonl`.

  A line is durable once `write` returns. A resumed run calls `truncate_after`
  with its checkpoint's step. Except for times, its final file then equals that
  of a run that was never interrupted. `last_step` is the last line's step; -1
  without a line.
  """

  def __init__(
      self,
      workdir: str | os.PathLike,
      *,
      tensorboard: bool,
      wandb: WandbConfig | None = None,
  ):
    """Opens the files and drops an incomplete last line.

    Args:
      workdir: the run's folder; it is created if missing.
      tensorboard: whether to write `<workdir>/tensorboard/` too.
      wandb: also log to Weights & Biases; None for no.

    Raises:
      ValueError: a line of `metrics.jsonl` before the last one is malformed, or
        wandb did not start.
    """
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    # wandb comes first, because it may fail and no file is open yet.
    self._wandb = WandbRun(wandb, workdir) if wandb is not None else None
    self._path = workdir / 'metrics.jsonl'
    self.last_step = _repair(self._path)
    self._file = open(self._path, 'ab')
    self._events = _EventFile(workdir / 'tensorboard') if tensorboard else None

  def write(self, step: int, metrics: dict[str, Any]) -> None:
    """Appends the line {'step': step, **metrics}.

    Args:
      step: the step; it must be larger than that of the last write.
      metrics: name -> Python, NumPy or jax scalar, `Mean` (left out if its
        weight is 0), or a nested dict or list of these, which TensorBoard does
        not get. Values that are not finite become null, and the line's list
        'nonfinite' names them.

    Raises:
      ValueError: the step is already written, a name is reserved, or a value
        has another type.
    """
    step = int(step)
    if step <= self.last_step:
      raise ValueError(
          f'step {step} does not follow step {self.last_step} of '
          f'{self._path}; write a step once, or truncate_after({step - 1})'
      )
    for name in _RESERVED:
      if name in metrics:
        raise ValueError(f'a metric cannot be named {name!r}; choose another')
    nonfinite: list[str] = []
    line: dict[str, Any] = {'step': step}
    scalars: dict[str, float] = {}
    for name, value in metrics.items():
      value = _plain(name, value)
      if value is None:
        continue
      if isinstance(value, int | float):
        scalars[name] = value
      line[name] = _finite(name, value, nonfinite)
    if nonfinite:
      line['nonfinite'] = nonfinite
    text = json.dumps(line, allow_nan=False) + '\n'
    # One write call, so that a kill can only cut the line's end.
    self._file.write(text.encode())
    self._file.flush()
    os.fsync(self._file.fileno())
    self.last_step = step
    if self._events is not None:
      self._events.write_scalars(step, scalars)
    if self._wandb is not None:
      self._wandb.write_scalars(step, scalars)

  def truncate_after(self, step: int) -> None:
    """Drops the lines of later steps, atomically; -1 drops all.

    Args:
      step: the last step to keep, from which the run resumes.
    """
    self._file.close()
    self.last_step, kept = -1, 0
    with open(self._path, 'rb') as file:
      for line in file:
        found = _step(line, whole=False)
        if found is None or found > step:
          break
        self.last_step, kept = found, kept + len(line)
    # One system call, which is atomic and needs no disk space.
    os.truncate(self._path, kept)
    self._file = open(self._path, 'ab')
    os.fsync(self._file.fileno())
    if self._events is not None:
      self._events.purge_from(step + 1)
    if self._wandb is not None and step < 0:
      self._wandb.begin_anew()

  def close(self) -> None:
    """Closes the files; everything written is already durable."""
    try:
      self._file.close()
    finally:
      if self._events is not None:
        self._events.close()
      if self._wandb is not None:
        self._wandb.close()


def _repair(path: pathlib.Path) -> int:
  """Drops an incomplete last line; returns the last step, -1 without one."""
  if not path.exists():
    return -1
  last_step, good = -1, 0
  with open(path, 'rb') as file:
    for number, line in enumerate(file, start=1):
      is_last = not file.peek(1)
      step = _step(line, whole=is_last)
      if step is not None:
        last_step, good = step, good + len(line)
      elif is_last:
        logging.warning('%s: dropped an incomplete last line', path)
        os.truncate(path, good)
      else:
        raise ValueError(
            f'{path} line {number} is not a line of metrics: {line[:60]!r};'
            ' repair it or move the file away'
        )
  return last_step


def _step(line: bytes, *, whole: bool) -> int | None:
  """Returns the step of a line of metrics.jsonl; None if it is malformed.

  Args:
    line: the line with its newline.
    whole: whether to parse the whole line. If not, only its start and end are
      checked, because a long run's file may have hundreds of megabytes.
  """
  if not line.endswith(b'\n'):
    return None
  if not whole and line.endswith(b'}\n') and (begin := _BEGIN.match(line)):
    return int(begin[1])
  try:
    step = json.loads(line)['step']
  except (ValueError, KeyError, TypeError):
    return None
  return step if isinstance(step, int) else None


def _plain(name: str, value: Any) -> Any:
  """Converts a metric to Python numbers, lists and dicts; None if empty."""
  match value:
    case Mean():
      return value.value()
    case dict():
      inner = {str(k): _plain(f'{name}/{k}', v) for k, v in value.items()}
      return {k: v for k, v in inner.items() if v is not None}
    case list() | tuple():
      return [_plain(f'{name}/{i}', v) for i, v in enumerate(value)]
    case bool() | int() | float():
      return value
    case np.ndarray() | np.generic() | jax.Array():
      array = np.asarray(value)
      if array.dtype.kind not in 'biu':
        # Also converts bfloat16 and the 8-bit floats.
        array = array.astype(np.float64)
      return array.tolist()
    case _:
      raise ValueError(
          f'metric {name} is {value!r}; allowed: numbers, arrays, Mean, and '
          'lists or dicts of them'
      )


def _finite(name: str, value: Any, nonfinite: list[str]) -> Any:
  """Replaces values that are not finite by None and records their names."""
  match value:
    case dict():
      return {k: _finite(f'{name}/{k}', v, nonfinite) for k, v in value.items()}
    case list():
      return [_finite(f'{name}/{i}', v, nonfinite) for i, v in enumerate(value)]
    case float() if not math.isfinite(value):
      nonfinite.append(name)
      return None
    case _:
      return value


class _EventFile:
  """A TensorBoard event file, written without TensorFlow."""

  def __init__(self, folder: pathlib.Path):
    # Imported here, because only users of TensorBoard need the package.
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    # Any: generated modules, whose members type checkers cannot see.
    self._event_pb2: Any = event_pb2
    self._summary_pb2: Any = summary_pb2
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads a folder's files in the order of their names. The clock
    # may be earlier than at the last start, for example on another machine.
    earlier = [_EVENTS.match(path.name) for path in folder.iterdir()]
    begins = [float(found[1]) + 1e-3 for found in earlier if found]
    name = (
        f'events.out.tfevents.{max([time.time_ns() / 1e9, *begins]):020.9f}.'
        f'{socket.gethostname()}.{os.getpid()}'
    )
    # RecordWriter and not EventFileWriter, whose thread swallows errors and
    # which imports TensorFlow if that is installed.
    self._records = RecordWriter(open(folder / name, 'wb'))
    self._write(file_version='brain.Event:2')

  def write_scalars(self, step: int, scalars: dict[str, float]) -> None:
    values = [
        self._summary_pb2.Summary.Value(tag=name, simple_value=value)
        for name, value in scalars.items()
    ]
    self._write(step=step, summary=self._summary_pb2.Summary(value=values))

  def purge_from(self, step: int) -> None:
    """Tells TensorBoard to ignore these steps in earlier files."""
    start = self._event_pb2.SessionLog(status=self._event_pb2.SessionLog.START)
    self._write(step=step, session_log=start)

  def close(self) -> None:
    self._records.close()

  def _write(self, **fields: Any) -> None:
    event = self._event_pb2.Event(wall_time=time.time(), **fields)
    self._records.write(event.SerializeToString())
    self._records.flush()
