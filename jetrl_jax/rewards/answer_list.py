r"""A final answer that is a list: '1, -2', '2, 3, \text{ and } 4', '\{1,2\}'.

References of MATH write the solutions of an equation as a bare list, in no
order that an answer could know, and a root as often as it occurs. An ordered
tuple stands in parentheses and is no list here; names in words are a ranking
and keep their order. A comma without a space before groups of three digits is
part of a number: '1,000' is one, '1, 000' and '1,00' are lists; MATH also
writes '1,\!000' and '1{,}000'.
"""

import re
from collections.abc import Callable

_SPACE = r'(?:\s|\\[,;: ]|\\quad|\\qquad|~)'
_SPACES = re.compile(rf'^{_SPACE}+|{_SPACE}+$')
# The commas within a number; all of a run, or none: '1,000,2' is a list.
_GROUPED = re.compile(
    r'(?<![\d.])(?<!\d,)[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)', re.ASCII
)
# What opens or closes a bracket, or parts two entries. '\,' is a space.
_TOKEN = re.compile(
    r'(?P<open>\\langle|\\?[{(\[])|(?P<close>\\rangle|\\?[})\]])'
    r'|(?P<text>\\(?:text|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*,?\s*\})'
    r'|(?P<word>(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))|\\.|(?P<comma>[,;])'
)
_TEXT = re.compile(r'\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{([^{}\\]*)\}')
_BRACES = re.compile(r'(?:\\left\s*)?\\\{(.*?)(?:\\right\s*)?\\\}', re.DOTALL)
_OR = re.compile(
    r'\\(?:text|mathrm|mbox)\s*\{\s*or\s*\}|(?<![a-zA-Z\\])or(?![a-zA-Z])'
)
_CUP = re.compile(r'\\cup(?![a-zA-Z])')
_RELATION = re.compile(r'[<>≤≥]|\\(?:leq?|geq?|[lg]t)(?:slant)?(?![a-zA-Z])')
_VARIABLE = re.compile(r'(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])')
_BOTH_SIGNS = re.compile(r'\\(pm|mp)(?![a-zA-Z])')
_WORDS = re.compile(r'(?:\\text\{)?[a-z][a-z -]+\}?', re.IGNORECASE)


def entries(text: str, *, braces: bool = False) -> list[str]:
  r"""Returns the entries of a bare list; of any other text, the text alone.

  Args:
    text: an answer.
    braces: read '\{1,2\}' as a list, too.

  Returns:
    What stands between top-level commas, semicolons, 'and' and 'or', without
    the spaces around it; thousands of numbers are written without commas.
  """
  inside, is_text = text, False
  if match := _TEXT.fullmatch(text):
    inside, is_text = match[1], True
  elif braces and (match := _BRACES.fullmatch(text)):
    inside = match[1]
  if '\\begin' in inside:  # A matrix has commas of its own.
    return [text]
  inside = re.sub(r'\\!\s*', '', inside)
  pieces = _split(_GROUPED.sub(lambda m: m[0].replace(',', ''), inside))
  if pieces is None or len(pieces) < 2:
    return [text]
  if is_text:
    # Letters in it are words, and not a product of variables.
    return [rf'\text{{{p}}}' if re.search('[A-Za-z]', p) else p for p in pieces]
  return pieces


def _split(text: str) -> list[str] | None:
  """Splits at the top level; None where brackets do not fit together."""
  pieces, depth, start = [], 0, 0
  for token in _TOKEN.finditer(text):
    if token.lastgroup == 'open':
      depth += 1
    elif token.lastgroup == 'close':
      depth -= 1
      if depth < 0:
        return None
    elif token.lastgroup is not None and depth == 0:
      pieces.append(text[start : token.start()])
      start = token.end()
  if depth:
    return None
  pieces.append(text[start:])
  stripped = [_SPACES.sub('', piece) for piece in pieces]
  return [piece for piece in stripped if piece]


def with_both_signs(entries: list[str]) -> list[str]:
  r"""Returns '1+x' and '1-x' in the place of '1 \pm x'.

  Args:
    entries: of a list. One with several such signs stays as it is: nobody says
      which go together.
  """
  found = []
  for entry in entries:
    signs = _BOTH_SIGNS.findall(entry)
    if len(signs) != 1:
      found.append(entry)
      continue
    first, second = '+-' if signs[0] == 'pm' else '-+'
    for sign in (first, second):
      text = _BOTH_SIGNS.sub(sign, entry).strip()
      # A sign of its own: '+3' is 3; 'x=+3' is 'x=3'.
      found.append(re.sub(r'(^|[=(\[{]\s*)\+', r'\1', text))
  return found


def as_union(answer: str, reference: str) -> tuple[list[str], list[str]] | None:
  r"""Splits 'x < 2 or x > 5' for a reference '(-\infty,2) \cup (5,\infty)'.

  Returns:
    The inequalities and the intervals; None where the answer is no
    inequalities of one variable with 'or' between them, or the reference no
    union.
  """
  intervals = [piece.strip() for piece in _CUP.split(reference)]
  pieces = [_SPACES.sub('', piece) for piece in _OR.split(answer)]
  variables = [set(_VARIABLE.findall(piece)) for piece in pieces]
  if (
      len(intervals) < 2
      or len(pieces) < 2
      or not all(map(_RELATION.search, pieces))
      or any(len(found) != 1 or found != variables[0] for found in variables)
  ):
    return None
  return pieces, intervals


def is_same(
    answer: list[str],
    reference: list[str],
    is_right: Callable[[str, str], bool],
) -> bool:
  """Compares lists: the same entries, each as often, in any order.

  Words keep their order.

  Args:
    answer: entries of the model's answer.
    reference: the reference answer of the data set.
    is_right: compares an entry with one of the reference.
  """
  if len(answer) != len(reference):
    return False
  if all(_WORDS.fullmatch(entry) for entry in reference):
    return all(map(is_right, answer, reference))
  left = list(answer)
  for wanted in reference:
    found = next((e for e in left if is_right(e, wanted)), None)
    if found is None:
      return False
    left.remove(found)
  return True
