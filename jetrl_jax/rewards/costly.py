"""Finds answers that a verifier would never finish, from their text alone.

A time limit stops them too (`rewards/pool.py`). But each one then costs the
whole limit and a worker, and the score depends on the machine. The rules allow
whatever the reference has, however costly. What no rule knows is left to the
time limit.
"""

import math
import re
from typing import Any

# MATH's longest reference answer has 159 characters, and its deepest 3 levels.
MAX_ANSWER_CHARS = 512
_MAX_DEPTH = 8
_MAX_POWERS = 24
# Each division in a row multiplies a parser's work.
_MAX_DIVISIONS = 8
# Largest degree in a letter, or of all powers of sums; a reference raises it.
_MAX_DEGREE = 9
# Largest exponent of a number.
_MAX_EXPONENT = 999
# SymPy solves equations of degree 3 in milliseconds, some of degree 5 in none.
_MAX_SOLVED_DEGREE = 3
_FORMS = tuple(
    re.compile(pattern)
    for pattern in (
        r'\d[\d,]{100}',
        r'\^\s*[{(\s]*-?\s*\d{4}',  # An exponent of 1000 or more.
        r'\^\s*(?:\{[^{}]*|\\?\w+\s*)\^',  # A tower of powers.
        r'\^\s*[{(\s]*\d+\s*(?:\\cdot|\\times|\*)',  # To a product.
        r'\d[\d,]{3,}\s*[})\s]*!',  # The factorial of 1000 or more,
        r'!\s*[})\s]*!',  # of a factorial,
        r'\^\s*-?\d+\s*!',  # of a power,
        r'[})]\s*!',  # or of an expression.
        r'binom[^a-zA-Z]*\d{4}',
        r'\\(?:log|ln)[\s{(]*\\(?:log|ln)',
    )
)
_DIVISION = re.compile(r'/|:|\\div(?![a-zA-Z])')
_EXPONENT = re.compile(r'\^\s*[{(\s]*-?\s*(\d+)', re.ASCII)
# A sum has a sign after its first term; a leading one is a number's.
_SUM = re.compile(r'[^\s{(\[]\s*(?:[+-]|\\[pm][pm](?![a-zA-Z]))')
# But for e, i and pi, whose powers are not multiplied out.
_LETTER = re.compile(r'(?<![\\a-zA-Z])[a-df-hj-zA-Z]|\\(?!pi)[a-z]+(?:_\w)?$')
# A letter or a command, with its subscript.
_NAME = re.compile(r'(?:\\[a-zA-Z]+|[a-zA-Z])(?:_\w)?$')
_UNICODE = str.maketrans(
    {
        '\u2212': '-',
        '\u2010': '-',
        '\u2011': '-',
        '\u2013': '-',
        '\u00ba': r'^\circ ',
        '\u2248': r'\approx ',
        '\u2155': r'\frac{1}{5}',
        '\u215b': r'\frac{1}{8}',
        '\u215c': r'\frac{3}{8}',
        '\u215d': r'\frac{5}{8}',
        '\u215e': r'\frac{7}{8}',
        '\u00d7': r'\times ',
        '\u00b7': r'\cdot ',
        '\u00bd': r'\frac{1}{2}',
        '\u2153': r'\frac{1}{3}',
        '\u2154': r'\frac{2}{3}',
        '\u00bc': r'\frac{1}{4}',
        '\u00be': r'\frac{3}{4}',
        '\u221e': r'\infty ',
        '\u03c0': r'\pi ',
        '\u2264': r'\le ',
        '\u2265': r'\ge ',
        '\u2260': r'\ne ',
        '\u222a': r'\cup ',
        '\u2229': r'\cap ',
        '\u2208': r'\in ',
        '\u2205': r'\emptyset ',
        '\u211d': r'\mathbb{R}',
        '\u230a': r'\lfloor ',
        '\u230b': r'\rfloor ',
        '\u2308': r'\lceil ',
        '\u2309': r'\rceil ',
    }
)
# '10\u207b\u00b3' is '10^{-3}'.
_SUPERSCRIPTS = (
    '\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b'
)
_POWER = re.compile(f'[{_SUPERSCRIPTS}]+')
_ORDINARY = str.maketrans(_SUPERSCRIPTS, '0123456789-')
_ROOT = re.compile(r'\u221a\s*(?:\((?P<sum>[^()]*)\)|(?P<one>\d+|[a-zA-Z]))')
_CLOSING = {')': '(', '}': '{', ']': '['}


def is_costly(answer: str, reference: str) -> bool:
  """Tells whether no verifier is given an answer.

  Args:
    answer: a model's, of any length.
    reference: the data set's; what it has is allowed.
  """
  if len(answer) > MAX_ANSWER_CHARS or _depth(answer) > _MAX_DEPTH:
    return True
  if answer.count('^') > max(_MAX_POWERS, reference.count('^')):
    return True
  divisions = len(_DIVISION.findall(answer))
  if divisions > max(_MAX_DIVISIONS, len(_DIVISION.findall(reference))):
    return True
  if any(form.search(answer) and not form.search(reference) for form in _FORMS):
    return True
  numbers, letters, sums = _exponents(answer)
  allowed = _exponents(reference)
  # Twice: factors of the reference may be multiplied out.
  most = max(_MAX_DEGREE, 2 * sum(map(sum, allowed)))
  return (
      max(numbers) > max(_MAX_EXPONENT, *allowed[0])
      or max(letters) > most
      or sum(sums) > most
  )


def in_latex(text: str) -> str:
  r"""Returns '2\sqrt{3}' of '2√3': symbols of Unicode as LaTeX names them."""
  text = _ROOT.sub(r'\\sqrt{\g<sum>\g<one>}', text).replace('\u221a', r'\sqrt')
  text = text.replace(r'\varnothing', r'\emptyset')
  text = _POWER.sub(lambda m: f'^{{{m[0].translate(_ORDINARY)}}}', text)
  return text.translate(_UNICODE)


def without_redundant_braces(text: str) -> str:
  """Returns '1' of '{{{1}}}', whose every brace doubles a parser's work."""
  pairs, open_braces = {}, []
  for token in re.finditer(r'\\.|[{}]', text, re.DOTALL):
    if token[0] == '{':
      open_braces.append(token.start())
    elif token[0] == '}':
      if not open_braces:
        return text
      pairs[open_braces.pop()] = token.start()
  dropped = set()
  for start, end in pairs.items():
    inside = text[start + 1 : end]
    inner = start + 1 + len(inside) - len(inside.lstrip())
    if inner in pairs and not text[pairs[inner] + 1 : end].strip():
      dropped |= {inner, pairs[inner]}
  if pairs.get(0) == len(text) - 1:
    dropped |= {0, len(text) - 1}
  return ''.join(c for i, c in enumerate(text) if i not in dropped)


def _depth(text: str) -> int:
  depth = deepest = 0
  for char in text:
    depth += (char in '{([') - (char in '})]')
    deepest = max(deepest, depth)
  return deepest


def _exponents(text: str) -> tuple[list[int], list[int], list[int]]:
  """Returns the exponents of numbers, of letters and of sums.

  Powers of powers are multiplied; there is a 0 in every list.
  """
  numbers, letters, sums = [0], [0], [0]
  for match in _EXPONENT.finditer(text):
    base = _base(text[: match.start()].rstrip())
    kind = letters if _LETTER.search(base) else numbers
    kind = sums if _SUM.search(base) else kind
    inside = max(1, *map(max, _exponents(base)))
    kind.append(int(match[1][:9]) * inside)
  return numbers, letters, sums


def _base(before: str) -> str:
  """Returns what a power is of, given the text before its caret."""
  close = before[-1:]
  if close not in _CLOSING:
    match = _NAME.search(before)
    return match[0] if match else ''
  depth = 0
  for start in range(len(before) - 1, -1, -1):
    depth += (before[start] == close) - (before[start] == _CLOSING[close])
    if depth == 0:
      return before[start + 1 : -1].removesuffix('\\right')
  return before


def is_hard_equation(difference: Any) -> bool:
  """Tells whether an equation is not to be solved.

  Args:
    difference: SymPy expression, of its sides.
  """
  return _degree(difference)[0] > _MAX_SOLVED_DEGREE


def _degree(expression: Any) -> tuple[float, bool]:
  """Returns a bound of the degree, and whether this is a polynomial.

  Denominators and roots count too, and add up over terms, as they do once an
  equation is free of them. Infinite where a function or an exponent has a
  symbol.
  """
  if not expression.free_symbols:
    return 0, True
  if expression.is_Symbol:
    return 1, True
  if expression.is_Pow and expression.exp.is_Rational:
    degree, is_polynomial = _degree(expression.base)
    p, q = abs(expression.exp.p), expression.exp.q
    return degree * p * q, is_polynomial and expression.exp.p > 0 and q == 1
  if not (expression.is_Add or expression.is_Mul):
    return math.inf, False
  degrees, polynomials = zip(*map(_degree, expression.args), strict=True)
  is_polynomial = all(polynomials)
  if expression.is_Add and is_polynomial:
    return max(degrees), True
  return sum(degrees), is_polynomial
