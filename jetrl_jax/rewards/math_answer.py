r"""Is the final answer of a response the reference answer?

A response's answer is what its last `\boxed{...}` holds, else what follows its
last `####`. Numbers, fractions and equal texts are decided here, exactly, a
sentence's full stop and words behind a number left out; everything else
goes to math-verify, which parses LaTeX with a grammar and compares with SymPy.

The text comes from a model under optimisation, so it is treated as hostile:

* It is never evaluated. math-verify's plain-expression mode hands text to
  SymPy's `parse_expr`, which is Python's `eval`; it is not used, and while an
  answer is being compared the two places where SymPy runs generated code are
  shut.
* Forms that take for ever, or that would pass an unsolved problem off as its
  answer (an integral, a limit), are refused unless the reference has them too.
  What a rule can refuse a clock must not decide: a clock makes the score
  depend on the machine.
* The rest is bounded by the process it runs in (`rewards/pool.py`). The time
  limits of math-verify are off: they are signals, which do not stop work in C.
"""

import contextlib
import fractions
import functools
import importlib
import re
from collections.abc import Iterator
from typing import Any

# MATH's longest reference answer has 159 characters.
MAX_ANSWER_CHARS = 512
_MAX_DEPTH = 16
_MAX_POWERS = 24
# float_rounding of math-verify: two decimals this close are equal to it.
_ROUNDING = fractions.Fraction(1, 10**6)

_NUMBER = re.compile(
    r'(?P<sign>[+-]?)'
    r'(?P<whole>\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)?'
    r'(?P<decimals>\.\d+)?(?P<percent>%?)',
    re.ASCII,
)
_COUNTED = re.compile(
    r'(?P<number>[+-]?\\?\$?[\d.,]*\d)(?P<words>(?:[ -][a-z]{2,})+)',
    re.ASCII | re.IGNORECASE,
)
# '18 dollars' is 18; with one of these words a number is another.
_FACTORS = frozenset(
    'pi percent dozen dozens hundred thousand million billion trillion half'
    ' halves third thirds quarter quarters fourth fourths fifth fifths sixth'
    ' sixths seventh sevenths eighth eighths ninth ninths tenth tenths'
    ' hundredth hundredths thousandth thousandths squared cubed factorial'
    ' sqrt'.split()
)
# What ends a sentence, and LaTeX's spaces.
_END = re.compile(r'(?:\\[,;:! ]|[,;:\s]|(?<!\.)(?<!\\right)\.)+$')
_TEXT = re.compile(r'\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{([^{}]*)\}')
_MIXED = re.compile(
    r'(?P<sign>-?)(?P<whole>\d{1,9})(?: (?P<a>\d{1,9})/(?P<b>\d{1,9})'
    r'|\\[dt]?frac\{(?P<p>\d{1,9})\}\{(?P<q>\d{1,9})\})',
    re.ASCII,
)
# What SymPy's parser makes of a number or a name before it would evaluate it.
_ATOM_CODE = re.compile(
    r"Integer \((?P<integer>\d+) ?\)|Float \('(?P<float>[\d.eE+-]+)' ?\)"
    r"|Symbol \('(?P<name>\w+)' ?\)",
    re.ASCII,
)
_FRACTION = re.compile(
    r'(?P<sign>-?)(?:\\[dt]?frac\{(?P<p>\d+)\}\{(?P<q>\d+)\}'
    r'|(?P<a>\d+)/(?P<b>\d+))',
    re.ASCII,
)
_COSTLY = tuple(
    re.compile(pattern)
    for pattern in (
        # Problems, not answers; most are evaluated while they are parsed.
        *(
            rf'\\{name}(?![a-zA-Z])'
            for name in (
                *('int', 'iint', 'iiint', 'oint', 'sum', 'prod', 'lim'),
                *('operatorname', 'det', 'gcd', 'lcm', 'partial', 'Gamma'),
                *('gamma', 'xrightarrow', 'max', 'min', 'exp'),
            )
        ),
        r'frac\s*\{?\s*d\s*\}?\s*\{?\s*d',  # A derivative.
        r'\d[\d,]{100}',
        r'\^\s*[{(\s]*-?\s*\d{4}',  # An exponent of 1000 or more.
        r'\^\s*(?:\{[^{}]*|\\?\w+\s*)\^',  # A tower of powers.
        r'\d[\d,]{3,}\s*[})\s]*!',  # The factorial of 1000 or more,
        r'!\s*[})\s]*!',  # of a factorial,
        r'[})]\s*!',  # or of an expression.
        r'binom[^a-zA-Z]*\d{4}',
        r'\\(?:log|ln)[\s{(]*\\(?:log|ln)',
    )
)


def extract_answer(response: str) -> str:
  r"""Returns the final answer of a response, '' if it has none.

  Args:
    response: the model's text, of any length.

  Returns:
    What the last `\boxed{}` or `\fbox{}` encloses, braces balanced; without
    one, the rest of the line after the last '####'. An answer that is not
    closed or longer than `MAX_ANSWER_CHARS` is none.
  """
  command = max(('\\boxed', '\\fbox'), key=response.rfind)
  start = response.rfind(command)
  if start < 0:
    return after_marks(response)
  return _enclosed(response, start + len(command))


def after_marks(response: str) -> str:
  """Returns the line after the last '####', '' if there is none."""
  start = response.rfind('####')
  if start < 0:
    return ''
  # One character more than is allowed shows that the line is too long.
  line = response[start + 4 : start + 4 + MAX_ANSWER_CHARS + 1]
  line = line.split('\n', 1)[0]
  return line.strip() if len(line) <= MAX_ANSWER_CHARS else ''


def _enclosed(text: str, start: int) -> str:
  """Returns what the brace group that opens at `start` encloses."""
  text = text[start : start + MAX_ANSWER_CHARS + 16].lstrip()
  if not text.startswith('{'):
    return ''
  depth = 0
  escaped = False
  for index, char in enumerate(text):
    if escaped:
      escaped = False
    elif char == '\\':
      escaped = True
    elif char == '{':
      depth += 1
    elif char == '}':
      depth -= 1
      if depth == 0:
        answer = text[1:index].strip()
        return answer if len(answer) <= MAX_ANSWER_CHARS else ''
  return ''


def parse_number(text: str) -> tuple[fractions.Fraction, bool] | None:
  r"""Reads a plain number: '1,234.50', '-\$3', '7\%'; None for all else.

  Args:
    text: an answer.

  Returns:
    The exact value without the percent sign, and whether there was one.
  """
  if len(text) > 100:
    return None
  text = text.replace('{,}', ',').replace('\\!', '')
  text = re.sub(r'\\[ ,;]', ' ', text).replace('\\', '').replace('$', '')
  match = _NUMBER.fullmatch(_compact(text).rstrip('.'))
  if match is None or not (match['whole'] or match['decimals']):
    return None
  whole = re.sub('[, ]', '', match['whole'] or '0')
  value = fractions.Fraction(f'{match["sign"]}{whole}{match["decimals"] or ""}')
  return value, bool(match['percent'])


def is_refused(answer: str, reference: str) -> bool:
  """Tells whether the answer is of a form that no verifier is given."""
  depth = deepest = 0
  for char in answer:
    depth += (char in '{([') - (char in '})]')
    deepest = max(deepest, depth)
  if len(answer) > MAX_ANSWER_CHARS or deepest > _MAX_DEPTH:
    return True
  if answer.count('^') > max(_MAX_POWERS, reference.count('^')):
    return True
  return any(
      rule.search(answer) and not rule.search(reference) for rule in _COSTLY
  )


def is_right(answer: str, reference: str) -> bool:
  """Compares two answers; the caller has asked `is_refused` before.

  Args:
    answer: the model's final answer, see `extract_answer`.
    reference: the data set's, trusted.

  Returns:
    Whether they are the same number, text or mathematical object. False where
    math-verify fails.
  """
  answer, reference = _plainly(answer), _plainly(reference)
  # Beside a bare number only: elsewhere words may be the answer.
  if parse_number(reference):
    answer = _uncounted(answer)
  elif parse_number(answer):
    reference = _uncounted(reference)
  decided = _compare_plain(answer, reference)
  if decided is not None:
    return decided
  math_verify, seed = _libraries()
  with _evaluation_shut():
    # SymPy tests equality at random points; from a fixed seed an answer's
    # score does not depend on the answers before it.
    seed(0)
    try:
      return bool(
          math_verify.verify(
              list(_parse_reference(reference)),
              _parse(answer),
              timeout_seconds=None,
          )
      )
    except Exception:
      # What a parser raises on text made to break it is of no interest.
      return False


def warm_up() -> None:
  """Loads math-verify and fills its parser's tables, about 2 s once."""
  for text in (
      *('12', '-3.5', '1,000', r'\$5', r'20\%', 'x=5', '(1,2)', '[1,2)'),
      *(r'\frac{1}{2}', r'3\frac{1}{2}', r'\sqrt{2}', r'2\pi', 'x^2+1'),
      *(r'\{1,2\}', r'\text{yes}', r'90^\circ', r'(-\infty,3]\cup[4,5)'),
      *(r'\begin{pmatrix}1\\2\end{pmatrix}', '1+2i', r'\pm 3', r'5\text{ cm}'),
      *(r'y=\frac{x}{2}-3', r'x\le 2', '1,2,3', '(x^4+16)(x^2+4)(x+2)(x-2)'),
      *(r'\left(3,-\frac{\pi}{2}\right)', r'\left(-\frac{7 \pi}{4},2\right)'),
      *(r'11z^{17}(5+11z^{17})', '6t^4-19t^2+17t-10', r'\frac{3\sqrt{5}}{2}'),
  ):
    is_right(text + ' ', text)
    is_right(text, r'\sqrt{7}+z')


def _compact(text: str) -> str:
  """Removes spaces, but not between digits: '1 1/2' is not '11/2'."""
  return re.sub(r'(?<!\d) | (?!\d)', '', ' '.join(text.split()))


def _unwrapped(text: str) -> str:
  r"""Removes \text{} and its kin around what they hold."""
  return _TEXT.sub(r'\1', text)


def _plainly(text: str) -> str:
  """Returns an answer without a sentence's end, mixed numbers as fractions."""
  text = _END.sub('', text.strip().replace('°', r'^\circ'))
  if len(text) > 1 and text[0] == text[-1] == '$' and text.count('$') == 2:
    text = _END.sub('', text[1:-1].strip())
  match = _MIXED.fullmatch(_compact(text))
  if match is None:
    return text
  whole = int(match['whole'])
  p, q = int(match['a'] or match['p']), int(match['b'] or match['q'])
  if p >= q:
    return text
  return rf'{match["sign"]}\frac{{{whole * q + p}}}{{{q}}}'


def _uncounted(text: str) -> str:
  """Removes the words behind a number that tell what was counted."""
  match = _COUNTED.fullmatch(' '.join(_unwrapped(text).split()))
  if match is None:
    return text
  words = re.split('[ -]', match['words'].lower())
  return match['number'] if _FACTORS.isdisjoint(words) else text


def _compare_plain(answer: str, reference: str) -> bool | None:
  """Compares texts and numbers; None leaves the case to math-verify."""
  if not answer:
    return False
  if _compact(_unwrapped(answer)) == _compact(_unwrapped(reference)):
    return True
  left, right = parse_number(answer), parse_number(reference)
  if left is not None and right is not None:
    # '50%' answers '50' and '0.5', as in math-verify.
    (x, x_percent), (y, y_percent) = left, right
    if x == y or (
        x_percent != y_percent
        and (x if x_percent else y) / 100 == (y if x_percent else x)
    ):
      return True
    return False if abs(x - y) > _ROUNDING and x_percent == y_percent else None
  left, right = _parse_fraction(answer), _parse_fraction(reference)
  if left is not None and right is not None:
    return left == right
  return None


def _parse_fraction(text: str) -> fractions.Fraction | None:
  match = _FRACTION.fullmatch(_compact(text).strip('$'))
  if match is None or len(text) > 100:
    return None
  p, q = int(match['p'] or match['a']), int(match['q'] or match['b'])
  return None if q == 0 else fractions.Fraction(-p if match['sign'] else p, q)


@functools.cache
def _libraries() -> tuple[Any, Any]:
  """Imports math-verify (1 s) in the process that verifies, not its parent."""
  import logging

  import math_verify
  import sympy.core.random

  # `simplify` imports it when it is first called, on some answer's time.
  import sympy.physics.units

  # It warns that its timeouts are off, and logs every text it cannot read.
  logging.getLogger('math_verify').setLevel(logging.CRITICAL)
  return math_verify, sympy.core.random.seed


def _parse(text: str) -> list[Any]:
  """Parses one answer as LaTeX; never as a Python expression."""
  math_verify, _ = _libraries()
  config = math_verify.LatexExtractionConfig(
      try_extract_without_anchor=False, boxed_match_priority=0
  )
  return math_verify.parse(rf'\boxed{{{text}}}', [config], parsing_timeout=None)


@functools.lru_cache(maxsize=256)
def _parse_reference(text: str) -> tuple[Any, ...]:
  """The samples of a group share a reference."""
  return tuple(_parse(text))


def _make_atom(code: str, *_: object) -> Any:
  """Stands in for `eval` in SymPy's parser: numbers and names, no more."""
  import sympy

  match = _ATOM_CODE.fullmatch(code)
  if match is None:
    raise ValueError('the text of an answer is not evaluated')
  if match['integer']:
    return sympy.Integer(int(match['integer']))
  if match['float']:
    return sympy.Float(match['float'])
  return sympy.Symbol(match['name'])


def _refuse_code(*_: object) -> None:
  raise ValueError('code made from an answer is not run')


@contextlib.contextmanager
def _evaluation_shut() -> Iterator[None]:
  """Shuts the two places where SymPy runs code that it made from text.

  `sympify` of a string is `eval`, `lambdify` is `exec`; a name in the module
  hides the built-in one. latex2sympy makes its numbers through the first.
  """
  parser = importlib.import_module('sympy.parsing.sympy_parser')
  # sympy.utilities.lambdify is also a function of that name.
  lambdify = importlib.import_module('sympy.utilities.lambdify')
  vars(parser)['eval'] = _make_atom
  vars(lambdify)['exec'] = _refuse_code
  try:
    yield
  finally:
    del vars(parser)['eval'], vars(lambdify)['exec']
