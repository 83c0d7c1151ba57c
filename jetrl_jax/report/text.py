"""Text that is safe in the report, and numbers that people can read."""

import html
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

# Of a text that a model made, no more than this is shown.
MAX_CHARACTERS = 4000


def escape(text: Any) -> str:
  """Returns text that is inert in HTML, in an element or a quoted attribute.

  Characters that show nothing or turn the text around (controls, bidirectional
  overrides, lone surrogates) are written as escapes, so that what is read is
  what was there.
  """
  text = str(text)
  if not text.isascii() or not text.isprintable():
    text = ''.join(map(_visible, text))
  return html.escape(text, quote=True)


def _visible(character: str) -> str:
  # U+00A0, which is a space that does not break, is not `isprintable`.
  if character.isprintable() or character in '\n\t\xa0':
    return character
  return character.encode('unicode_escape').decode('ascii')


def clipped(text: Any) -> str:
  """Returns the escaped text, cut with a sentence that says so."""
  text = str(text)
  if len(text) <= MAX_CHARACTERS:
    return escape(text)
  return (
      escape(text[:MAX_CHARACTERS])
      + f'<i> ... {len(text) - MAX_CHARACTERS} more characters</i>'
  )


def script_json(value: Any) -> str:
  """Returns JSON that cannot end the script element it stands in.

  Raises:
    ValueError: a number is not finite.
  """
  text = json.dumps(value, allow_nan=False, separators=(',', ':'))
  # ASCII only, by json's default: U+2028 and the like are escapes already.
  for character in '<>&':
    text = text.replace(character, f'\\u{ord(character):04x}')
  return text


def number(value: float | None, unit: str = '', digits: int = 3) -> str:
  """Returns a value of about three digits with its unit.

  Args:
    value: None and NaN are a dash.
    unit: '%' for a share in [0, 1]; else appended.
    digits: significant ones; whole numbers below 1e6 keep all of theirs.
  """
  if value is None or not math.isfinite(value):
    return '–'
  if unit == '%':
    return f'{_digits(100 * value, digits)}%'
  return _digits(value, digits) + (f' {unit}' if unit else '')


def scale(values: Sequence[float], unit: str = '') -> list[str]:
  """Labels a scale with as many digits as tell its values apart.

  Args:
    values: in rising order.
    unit: as in `number`.
  """
  gaps = [high - low for low, high in itertools.pairwise(values)]
  digits = 3
  while gaps and digits < 9:
    errors = [abs(float(f'{v:.{digits}g}') - v) for v in values]
    if max(errors) < 0.05 * min(gaps):
      break
    digits += 1
  return [number(value, unit, digits) for value in values]


def _digits(value: float, digits: int) -> str:
  size = abs(value)
  if value == 0:
    return '0'
  if size >= 1e6 or size < 1e-3:
    mantissa, exponent = f'{value:.{digits - 1}e}'.split('e')
    return f'{mantissa.rstrip("0").rstrip(".")}e{int(exponent)}'
  if size >= 10 ** (digits - 1):
    return f'{value:.0f}'
  return f'{value:.{digits}g}'


def duration(seconds: float) -> str:
  """Returns '41 s', '4 min 12 s', '3 h 05 min' or '2 d 04 h'."""
  if seconds < 60:
    return f'{_digits(round(seconds, 1), 3)} s'
  whole = round(seconds)
  if whole < 3600:
    return f'{whole // 60} min {whole % 60:02d} s'
  if whole < 86400:
    return f'{whole // 3600} h {whole % 3600 // 60:02d} min'
  return f'{whole // 86400} d {whole % 86400 // 3600:02d} h'


def steps_text(count: int, noun: str = 'step') -> str:
  """Returns '1 step', '60 steps'."""
  return f'{count} {noun}{"" if count == 1 else "s"}'
