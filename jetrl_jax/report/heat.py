"""Heat maps of dots by steps: one small PNG each, with axes in SVG.

A pixel is a dot and a stretch of steps. Its palette index is the value's level
on the colour scale, so that the script can read the value back from the
picture and nothing is stored twice.
"""

import base64
import math
import struct
import zlib

import numpy as np

from jetrl_jax.report.axes import BOTTOM, LEFT, RIGHT, TOP, step_labels
from jetrl_jax.report.charts import Chart
from jetrl_jax.report.data import layer_and_kind
from jetrl_jax.report.text import escape, number, scale

_MAX_COLUMNS = 240
LEVELS = 200
# Palette: 0 is absent (clear), 1 is exactly zero (half clear grey), 2... the
# ramp. Anchors of viridis, which keeps its order without colour vision.
_ANCHORS = (
    '440154 482878 3e4989 31688e 26828e 1f9e89 35b779 6ece58 b5de2b fde725'
)
_KINDS = ('attn/qkv', 'attn/o', 'mlp/gate_up', 'mlp/down')
ABSENT, ZERO, FIRST = 0, 1, 2


def ramp() -> list[tuple[int, int, int]]:
  """Returns the LEVELS colours, dark to bright, no two of them equal."""
  anchors = [
      [int(a[i : i + 2], 16) for i in (0, 2, 4)] for a in _ANCHORS.split()
  ]
  places = np.linspace(0, len(anchors) - 1, LEVELS)
  channels = [
      np.interp(places, np.arange(len(anchors)), [a[c] for a in anchors])
      for c in range(3)
  ]
  return [(int(r), int(g), int(b)) for r, g, b in np.stack(channels, 1).round()]


def heat_map(
    title: str,
    dots: list[str],
    steps: np.ndarray,
    values: np.ndarray,
    *,
    unit: str,
    log: bool,
    worst: str,
) -> Chart:
  """Draws dots by steps, grouped by kind of dot and ordered by layer.

  Args:
    title: heading.
    dots: paths such as 'layers_0/attn/qkv'.
    steps: int64 [n].
    values: float32 [dots, n]; NaN is absent; at least one is not.
    unit: see `report_text.number`.
    log: levels are logarithmic; zeros have a colour of their own.
    worst: 'max' or 'min': what stands for several steps that share a column.
  """
  order = sorted(range(len(dots)), key=lambda i: _place(dots[i]))
  dots = [dots[i] for i in order]
  values = values[order].astype(np.float64)
  last = values[:, -1][np.isfinite(values[:, -1])]
  steps, values, every = _columns(steps, values, worst)
  low, high = _range(values, log)
  image = base64.b64encode(png(levels(values, low, high, log))).decode('ascii')
  height = min(max(len(dots) * 1.6, 120), 300)
  body = (
      f'<image href="data:image/png;base64,{image}" x="{LEFT}" y="{TOP}"'
      f' width="{RIGHT - LEFT}" height="{height:.1f}"'
      ' preserveAspectRatio="none"/>' + _kinds(dots, height)
  )
  shift = TOP + height - BOTTOM
  edges = (float(steps[0]) - every / 2, float(steps[-1]) + every / 2)
  body += f'<g transform="translate(0 {shift:.1f})">{step_labels(*edges)}</g>'
  layers = {layer_and_kind(dot)[0] for dot in dots} - {-1}  # The head's.
  notes = []
  if len(layers) > 1:
    notes.append(
        f'In each block layer {min(layers)} on top, {max(layers)} below.'
    )
  if every > 1:
    notes.append(f'A column is the {worst} of {every} steps.')
  ends, has_gaps = scale([low, high], unit), not np.isfinite(values).all()
  legend = (
      f'<p class="scale"><span>{ends[0]}</span><i class="ramp"></i>'
      f'<span>{ends[1]}</span>'
      + ('<i class="zero"></i><span>0</span>' if (values == 0).any() else '')
      + ('<i class="none"></i><span>none</span>' if has_gaps else '')
      + '</p>'
  )
  worst_now = getattr(np, worst)(last) if last.size else None
  below = ''.join(f'<p class="note">{escape(n)}</p>' for n in notes)
  html = (
      f'<figure class="card heat"><figcaption><h3>{escape(title)}</h3>'
      f'{legend}<p class="at">last step, {worst}: {number(worst_now, unit)}</p>'
      f'</figcaption><svg viewBox="0 0 360 {TOP + height + 22:.0f}"'
      f' role="img" aria-label="{escape(title)}: {len(dots)} dots by'
      f' {len(steps)} columns of steps, {ends[0]} to {ends[1]}">{body}'
      f'<g class="cursor"></g></svg>{below}</figure>'
  )
  data = {
      'dots': dots,
      'steps': steps.tolist(),
      'low': low,
      'high': high,
      'log': log,
      'unit': unit,
      'box': [LEFT, TOP, RIGHT, TOP + height],
  }
  return Chart(html=html, data=data)


def levels(
    values: np.ndarray, low: float, high: float, log: bool
) -> np.ndarray:
  """Returns uint8 palette indices of float [rows, columns] values."""
  found = np.full(values.shape, ABSENT, np.uint8)
  good = np.isfinite(values)
  inside = np.where(good, np.clip(values, low, high), low)
  if log:
    share = np.log(inside / low) / math.log(high / low)
  else:
    share = (inside - low) / (high - low)
  level = FIRST + np.rint(share * (LEVELS - 1)).astype(np.int64)
  found[good] = level[good].astype(np.uint8)
  if log:
    found[good & (values == 0)] = ZERO
  return found


def png(pixels: np.ndarray) -> bytes:
  """Encodes uint8 palette indices [rows, columns] as a PNG."""
  height, width = pixels.shape
  palette = [(0, 0, 0), (127, 127, 127), *ramp()]
  rows = np.hstack([np.zeros((height, 1), np.uint8), pixels])

  def chunk(kind: bytes, content: bytes) -> bytes:
    check = struct.pack('>I', zlib.crc32(kind + content))
    return struct.pack('>I', len(content)) + kind + content + check

  return b''.join(
      [
          b'\x89PNG\r\n\x1a\n',
          # Eight bits per pixel, colour type 3: indices into the palette.
          chunk(b'IHDR', struct.pack('>2I5B', width, height, 8, 3, 0, 0, 0)),
          chunk(b'PLTE', bytes(c for color in palette for c in color)),
          chunk(b'tRNS', bytes([0, 96])),
          chunk(b'IDAT', zlib.compress(rows.tobytes(), 9)),
          chunk(b'IEND', b''),
      ]
  )


def _columns(
    steps: np.ndarray, values: np.ndarray, worst: str
) -> tuple[np.ndarray, np.ndarray, int]:
  """Thins the steps; returns (a step per column, values, steps per column)."""
  every = -(-len(steps) // _MAX_COLUMNS)
  if every == 1:
    return steps, values, 1
  reduce, filler = (np.max, -np.inf) if worst == 'max' else (np.min, np.inf)
  parts = [slice(i, i + every) for i in range(0, len(steps), every)]
  filled = np.where(np.isfinite(values), values, filler)
  columns = np.stack([reduce(filled[:, p], axis=1) for p in parts], axis=1)
  columns[np.isinf(columns)] = np.nan
  middles = [steps[part][len(steps[part]) // 2] for part in parts]
  return np.asarray(middles), columns, every


def _range(values: np.ndarray, log: bool) -> tuple[float, float]:
  shown = values[np.isfinite(values) & ((values > 0) | (not log))]
  if not shown.size:  # Zeros only; the scale is not used.
    return (1.0, 2.0)
  low, high = float(shown.min()), float(shown.max())
  if low == high:
    return (low / 2, high * 2) if log else (low - 1, high + 1)
  return low, high


def _place(dot: str) -> tuple:
  """Sorts by kind, in the order of a block's forward, then by layer."""
  layer, kind = layer_and_kind(dot)
  place = _KINDS.index(kind) if kind in _KINDS else len(_KINDS)
  return place, kind, layer


def _kinds(dots: list[str], height: float) -> str:
  """Labels each kind of dot and draws lines between them."""
  kinds = [layer_and_kind(dot)[1] for dot in dots]
  row = height / len(dots)
  marks = []
  for kind in dict.fromkeys(kinds):
    first, count = kinds.index(kind), kinds.count(kind)
    top = TOP + first * row
    if first:
      marks.append(f'<path class="gap" d="M{LEFT} {top:.1f}H{RIGHT}"/>')
    marks.append(
        f'<text class="tick end" x="{LEFT - 5}"'
        f' y="{top + count * row / 2:.1f}" dy="3.5">'
        f'{escape(kind.rpartition("/")[2])}</text>'
    )
  return ''.join(marks)
