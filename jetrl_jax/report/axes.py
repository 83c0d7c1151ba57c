"""The axes of a chart: their ranges, round numbers on them, their drawing."""

import dataclasses
import math

import numpy as np

from jetrl_jax.report.text import escape, scale

# Units of the viewBox; on a narrow phone one is one CSS pixel.
WIDTH, HEIGHT = 360, 184
LEFT, RIGHT, TOP, BOTTOM = 52, 350, 10, 162


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
  """Maps values to places between two edges."""

  low: float
  high: float
  start: float
  end: float
  log: bool = False

  def place(self, value: float) -> float:
    """Returns the place, held inside the edges."""
    if self.log:
      value = max(value, self.low)
      share = math.log(value / self.low) / math.log(self.high / self.low)
    else:
      share = (value - self.low) / (self.high - self.low)
    return self.start + min(max(share, 0), 1) * (self.end - self.start)


def step_axis(steps: np.ndarray) -> Axis:
  """Returns the axis of steps, of which there is at least one."""
  low, high = float(steps.min()), float(steps.max())
  if low == high:
    low, high = low - 0.5, high + 0.5
  return Axis(low=low, high=high, start=LEFT, end=RIGHT)


def value_axis(values: np.ndarray, log: bool) -> Axis:
  """Returns the axis of all values; with `log` where they allow it."""
  # Room for the sums below; points beyond are held at the edge.
  values = np.clip(values[np.isfinite(values)], -1e300, 1e300)
  low, high = float(values.min()), float(values.max())

  def axis(low: float, high: float, log: bool = False) -> Axis:
    return Axis(low=low, high=high, start=BOTTOM, end=TOP, log=log)

  if log and low > 0 and high / low > 30:
    return axis(low / 1.2, high * 1.2, log=True)
  if low == high:
    # A flat line: at the bottom where it is 0, else in the middle.
    room = abs(low) / 2 or 1.0
    return axis(low - (room if low else 0), high + room)
  room = 0.06 * (high - low)
  # Counts and shares start at 0; a curve far above it does not.
  if 0 <= low <= 0.5 * high:
    return axis(0.0, high + room)
  return axis(low - room, high + room)


def ticks(low: float, high: float, log: bool) -> list[float]:
  """Returns three to six round values inside [low, high]."""
  if log:
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    if last - first >= 1:
      every = (last - first) // 5 + 1
      return [10.0**e for e in range(first, last + 1, every)]
    return [low, math.sqrt(low * high), high]
  rough = (high - low) / 4
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough)
  first = math.ceil(low / step - 1e-9)
  return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def grid(x: Axis, y: Axis, unit: str) -> str:
  """Returns the lines and labels of both axes."""
  marks = []
  values = ticks(y.low, y.high, y.log)
  labels = scale(values, unit)
  for value, label in zip(values, labels, strict=True):
    at = f'{y.place(value):.1f}'
    marks.append(
        f'<path class="grid-line" d="M{LEFT} {at}H{RIGHT}"/>'
        f'<text class="tick end" x="{LEFT - 5}" y="{at}" dy="3.5">'
        f'{escape(label)}</text>'
    )
  return ''.join(marks) + step_labels(x.low, x.high)


def step_labels(low: float, high: float) -> str:
  """Returns the labels of the step axis, which goes from LEFT to RIGHT."""
  axis = Axis(low=low, high=high, start=LEFT, end=RIGHT)
  values = [v for v in ticks(low, high, False) if v == int(v)]
  y = BOTTOM + 15
  labels = [f'<text class="tick end" x="{LEFT - 10}" y="{y}">step</text>']
  for value in values or [low]:
    text = f'{value:.0f}'
    # A long number at the right edge must not be cut.
    x = min(axis.place(value), WIDTH - 3.3 * len(text))
    labels.append(f'<text class="tick mid" x="{x:.1f}" y="{y}">{text}</text>')
  return ''.join(labels)
