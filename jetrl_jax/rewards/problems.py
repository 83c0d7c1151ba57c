r"""Answers that are the problem: '7^{999} \mod 13' where 5 is asked for.

A verifier evaluates what it is given, and a policy would be paid for copying
the question into the box. So an answer that names an operation is none, unless
the reference names one of its kind: '\sin 15^\circ' may answer where the
reference has a cosine. '\binom{10}{3} = 120' has its answer on the last side.
Arithmetic that is left to do ('\frac{36}{2}', '\sqrt{16}', '2^{10}') is taken,
as by other verifiers: where a problem ends there, no text says. But not if it
stands so in the prompt.

Of an equation the right side is taken, where the left side is what a problem
may ask for: 'x = 4', 'AB = 5', 'f(2) = 7', 'a + b = 5', '3x = 12',
'2 + 2 = 4'. With more done to a single variable, as in 'x^2 = 4', it is an
equation that is left to solve, unless the prompt asks for that side ('Find
x^2').
"""

import math
import re
from collections.abc import Callable


def _command(*names: str) -> str:
  return rf'\\(?:{"|".join(names)})(?![a-zA-Z])'


# The 'd' of a derivative, also upright.
_D = (
    r'(?:\\(?:mathrm|text|textrm)\s*\{\s*d\s*\}|\{\s*\\rm\s+d\s*\}'
    r'|\\rm\s+d|d)(?:\s*\^\s*\{?\d\}?)?'
)
_MOD = r'\\(?:[bp]?mod|pod)(?![a-zA-Z])|(?<![a-zA-Z\\])mod(?![a-zA-Z])'
_BAR = r'(?:\||\\[lr]?[vV]ert(?![a-zA-Z]))'
# Each kind: what the answer may not have where the reference has none of it.
_KINDS = tuple(
    re.compile(pattern)
    for pattern in (
        _command('i{1,3}nt', 'oint', 'partial', 'nabla')
        # '\frac{d}{dx}' before what is derived, or with it in the fraction.
        + rf'|frac\s*\{{?\s*{_D}\s*\}}?\s*\{{?\s*{_D}'
        rf'|frac\s*\{{\s*{_D}(?:[^{{}}]|\{{[^{{}}]*\}})*\}}'
        rf'\s*\{{\s*{_D}\s*[a-z]\s*\}}',
        _command('sum', 'prod', 'coprod', 'bigcup', 'bigcap'),
        _command('lim', 'limsup', 'liminf', 'sup', 'inf', 'xrightarrow'),
        # A remainder may be followed by its modulus, see `solved`.
        _MOD,
        _command('det', 'operatorname', 'Tr', 'tr', 'rank', 'dim', 'ker')
        + r'|[vV]matrix|\|\s*\\begin|vert\s*\\begin'
        # A power or a product of matrices.
        + r'|\\end\{\w+\}\s*(?:\\right\s*\S\s*|[)\]]\s*)?'
        r'(?:\^|(?:\\cdot|\\times)?\s*(?:\\left\s*\S|[(\[])?\s*\\begin)',
        r'\\[lr]?(?:floor|ceil)(?![a-zA-Z])|\\[lu][lr]corner',
        _command('gcd', 'lcm', 'max', 'min', 'arg', 'Re', 'Im')
        + r'|(?<![a-zA-Z])(?:gcd|lcm|max|min)\s*\(',
        _command('(?:arc)?(?:sin|cos|tan|cot|sec|csc)'),
        _command('log', 'ln', 'lg'),
        # Absolute values of numbers, also complex ones; with variables they are
        # an answer.
        rf'{_BAR}(?:\\(?:[dt]?frac|sqrt|cdot|times|pi|left|right)(?![a-zA-Z])'
        rf'|[^a-hj-zA-Z|\\])+{_BAR}',
    )
)
# A function and its values, or a power: by what the answer has, and what lets
# a reference have that.
_PAIRS = (
    # What is counted: binomials and factorials; '\!' is a space. Of letters
    # they are closed forms, where the reference has letters too.
    (
        re.compile(
            r'binom(?![a-zA-Z])|\\choose|(?<!\\)!(?!=)|' + _command('[gG]amma')
        ),
        re.compile(
            r'binom|\\choose|!|\\[gG]amma|(?<![\\a-zA-Z])[a-df-hj-zA-Z]'
            r'(?![a-zA-Z])'
        ),
    ),
    (
        re.compile(_command('(?:ar)?(?:sin|cos|tan|cot|sec|csc)h')),
        re.compile(
            _command('(?:ar)?(?:sin|cos|tan|cot|sec|csc)h', 'exp') + r'|e\s*\^'
        ),
    ),
    (re.compile(_command('exp')), re.compile(r'\\exp|e\s*\^')),
    # Only a remainder or a quotient makes an answer of such powers.
    (
        re.compile(r'\^\s*[{(\s]*-?\s*\d{3}'),
        re.compile(r'\^\s*[{(\s]*-?\s*(?:\d{2}|[a-zA-Z])'),
    ),
)
_SPACE = r'(?:\s|\\[,;: ])*'
_MODULUS = re.compile(
    rf'(?P<number>\d{{1,18}}){_SPACE}\(?{_SPACE}'
    rf'(?:\\[bp]?mod(?![a-zA-Z])|mod|\\text\{{\s*\(?mod\s*\}}){_SPACE}'
    rf'\{{?{_SPACE}(?P<modulus>\d{{1,18}}){_SPACE}\}}?{_SPACE}\)?',
    re.ASCII,
)
_RELATION = re.compile(
    r'(?P<open>\\?[{(\[])|(?P<close>\\?[})\]])'
    r'|(?P<equal>(?<![<>!\\])=|\\(?:equiv|approx)(?![a-zA-Z]))'
)

# Within a side of an equation, besides numbers and letters.
_OF_A_SIDE = re.compile(
    _command('[dtc]?frac', 'sqrt', 'cdot', 'times', 'div', 'pi')
    + r'|[-+*/^(){}\[\]|.]'
)
# One variable and a factor or a divisor: 'x', '3x', '\frac{1}{2}x', 'x/2'. 'e'
# and 'i' are numbers.
_MULTIPLE = re.compile(
    r'(?:\d+(?:\.\d+|/\d+)?(?:\*|\\cdot|\\times)?)?[a-zA-Z](?:/\d+)?'
    r'|\\frac\{?\d*[a-zA-Z]\}?\{?\d+\}?',
    re.ASCII,
)
_EQUAL = re.compile(r'(?<![<>!\\])=')
_NAMES = re.compile(r'\\[a-zA-Z]+')
_SIZED = re.compile(r'\\(?:left|right)(?![a-zA-Z])')
# Of a function: 'f(2)', 'f^{-1}(3)'.
_VALUE = re.compile(r'[a-zA-Z](?:\^(?:\d|\{-?\d+\}))?\(', re.ASCII)

# What two writings of one formula may differ in.
_LAYOUT = re.compile(
    r'\s|\$|~|\\[,;:! ()\[\]]|\\(?:left|right|displaystyle)(?![a-zA-Z])'
)
# '\frac34', '\dfrac{3}{4}': the fraction of two numbers, also written '3/4'.
_FRAC = re.compile(
    r'\\[dtc]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))',
    re.ASCII,
)
# Before or after what is only a part of a formula; after a space, a word's
# letters are none.
_GOES_BEFORE = re.compile(r'(?:[\w.\\]|[*/^_+-]\s*)$')
_FACTOR = re.compile(r'\d\s+$')
_GOES_ON = re.compile(r'\w|[.,]\d|\s*[*/^_+]|\s*-\s*[\d\\(a-z]')
_SQRT = re.compile(r'\\sqrt(\d)', re.ASCII)
_FINISHED = re.compile(
    r'(?:[a-zA-Z]=)?-?'
    r'(?:\d{1,9}\.\d+|(?P<number>\d{1,9})(?:/(?P<over>[1-9]\d{0,8}))?)',
    re.ASCII,
)
# A multiple of pi or of a root: '2\sqrt{3}', '\frac{\sqrt{3}}{2}', '5\pi/6';
# with a number before it '1+\sqrt{2}'.
_ROOT = r'(?P<times{0}>\d{{1,9}})?(?:\\pi|\\sqrt\{{(?P<root{0}>\d{{1,9}})\}})'
_MULTIPLE_OF_ROOT = re.compile(
    r'(?:[a-zA-Z]=)?-?(?:\d{1,9}[-+])?(?:\\frac\{'
    + _ROOT.format('')
    + r'\}\{(?P<below>[1-9]\d{0,8})\}|'
    + _ROOT.format('_')
    + r'(?:/(?P<below_>[1-9]\d{0,8}))?)',
    re.ASCII,
)
# 'x>3', and a fraction of two letters.
_PLAIN = re.compile(
    r'[a-zA-Z](?:<|>|\\[lg]e(?:q|qslant)?(?![a-zA-Z]))=?-?\d+(?:\.\d+|/\d+)?'
    r'|\\frac\{?[a-zA-Z]\}?\{?[a-zA-Z]\}?',
    re.ASCII,
)
_DEGREES = re.compile(r'\^\{?\\circ\}?')
_IN_UNITS = re.compile(r'-?[\d.,/]+\\(?:text|mathrm)\{[^{}]*\}\^\{?[23]\}?')
_TIMES = re.compile(r'\\(?:times|cdot)(?![a-zA-Z])|[\u00d7\u22c5\u00b7]')
_DIVIDED = re.compile(r'\\div(?![a-zA-Z])|\u00f7')
# '3(x+2)' is also written '3*(x+2)'.
_BEFORE_NO_DIGIT = re.compile(r'\s*\*\s*(?=[(\\a-zA-Z])')
# '144^{1/2}' is a root, and '1/\sqrt{2}' the fraction with a root below.
_HALF_POWER = re.compile(r'(?<![\w.])(\d+)\s*\^\s*\{\s*1/2\s*\}', re.ASCII)
_OVER_ROOT = re.compile(
    r'\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\\sqrt\s*\{\s*\d+\s*\})\s*\}',
    re.ASCII,
)
# '{2}', but not an argument of a command.
_BRACED = re.compile(r'(?<![a-zA-Z}\]])\{\s*(\w)\s*\}')
# Something is left to do; a sign alone is a number's.
_OPERATION = re.compile(
    r'[+*/^=_<>!]|(?<=[\w)}\]])-|binom|'
    + _command('[dtc]?frac', 'sqrt', 'cdot', 'times', 'div', 'overline', 'bar')
)


def with_slashes(text: str) -> str:
  r"""Returns a text with '3/4' for '\frac{3}{4}' and '\dfrac34'."""
  return _FRAC.sub(lambda m: f'{m[1] or m[2]}/{m[3] or m[4]}', text)


def _in_one_writing(text: str) -> str:
  r"""Returns a text with one sign for each operation, and few braces.

  '3/4' for '\frac{3}{4}', '2*3' for '2\times 3', 'x^2' for 'x^{2}'.
  """
  text = _SQRT.sub(r'\\sqrt{\1}', text.replace('{,}', ','))
  text = re.sub(r'\\[dtc]frac', r'\\frac', with_slashes(text))
  text = _HALF_POWER.sub(r'\\sqrt{\1}', _OVER_ROOT.sub(r'\1/\2', text))
  text = _DIVIDED.sub('/', _TIMES.sub('*', text))
  return _BRACED.sub(r'\1', _BEFORE_NO_DIGIT.sub('', text))


def _written(text: str) -> str:
  return _LAYOUT.sub('', _in_one_writing(text)).rstrip('.,;:')


def is_in(formula: str, prompt: str, *, alone: bool = False) -> bool:
  """Returns whether a prompt contains a formula, in any layout.

  A part of a formula is none: '1/2' is not in '11/20', nor 'x=2' in 'x=2+4x'.

  Args:
    formula: without its place in the prompt.
    prompt: what the model was asked.
    alone: the side of an equation is none, either.
  """
  written = _written(formula)
  if not written:
    return False
  prompt = _in_one_writing(prompt)
  if len(written) > len(prompt):  # No pattern of a long text is made.
    return False
  pattern = rf'(?:{_LAYOUT.pattern})*'.join(map(re.escape, written))
  return any(
      not _GOES_BEFORE.search(prompt[: match.start()])
      and not (written[0].isalpha() and _FACTOR.search(prompt[: match.start()]))
      and not _GOES_ON.match(prompt[match.end() :])
      and not (
          alone and _is_side(prompt[: match.start()], prompt[match.end() :])
      )
      for match in re.finditer(pattern, prompt)
  )


def _is_side(before: str, after: str) -> bool:
  around = ' \t\r\n$'
  return before.rstrip(around).endswith('=') or (
      after.lstrip(around).startswith('=')
  )


def is_unsolved(answer: str, reference: str, prompt: str) -> bool:
  """Tells whether an answer is an equation in one variable, left to solve.

  Its left side, the first one of a chain, is neither the variable nor a
  multiple of it: 'x^2 = 4' for 4, where 2 or -2 may be meant, and 'x + 1 = 4'.

  Args:
    answer: one entry, if it is a list.
    reference: where it is an equation, the two are compared as such.
    prompt: may ask for the left side.
  """
  left, *others = _EQUAL.split(answer)
  if not others or '=' in reference:
    return False
  written = _written(left)
  if not _OPERATION.search(written) or _MULTIPLE.fullmatch(written):
    return False
  rest = _OF_A_SIDE.sub(' ', written)
  # What else there is belongs to an angle, an index, a derivative, words.
  if not re.fullmatch(r'[\da-zA-Z\s]+', rest, re.ASCII):
    return False
  if len(set(re.findall('[a-zA-Z]', rest)) - {'e', 'i'}) != 1:
    return False
  if _VALUE.search(_NAMES.sub(' ', written)):
    return False
  return not is_in(left, _SIZED.sub('', prompt), alone=True)


def is_copied(answer: str, prompt: str) -> bool:
  """Tells whether an answer with something left to do is in the prompt.

  Nothing is left to do in 'x = 3', a reduced fraction or the root of a number
  that is no square, and so nothing is won by copying it.
  """
  answer = _without_brackets(answer.strip())
  written = _written(answer)
  return (
      bool(_OPERATION.search(_without_units(written)))
      and not _is_finished(written)
      and is_in(answer, prompt)
  )


def _without_units(written: str) -> str:
  r"""Returns '30' of '30^\circ', and '12' with its unit of '12 cm^2'."""
  if _IN_UNITS.fullmatch(written):
    return written.rpartition('^')[0]
  return _DEGREES.sub('', written)


def _without_brackets(text: str) -> str:
  """Returns '2+2' of '(2+2)'; a pair and an interval keep theirs."""
  if not re.fullmatch(r'\([^,]*\)', text, re.DOTALL):
    return text
  depth = 0
  for place, char in enumerate(text):
    depth += (char == '(') - (char == ')')
    if depth == 0:
      return text[1:-1] if place == len(text) - 1 else text
  return text


def _is_finished(written: str) -> bool:
  if _PLAIN.fullmatch(written):
    return True
  if match := _MULTIPLE_OF_ROOT.fullmatch(written):
    times, root, below = (
        match[name] or match[f'{name}_'] for name in ('times', 'root', 'below')
    )
    return (root is None or _is_square_free(int(root))) and (
        below is None or math.gcd(int(times or 1), int(below)) == 1
    )
  match = _FINISHED.fullmatch(written)
  if match is None:
    return False
  if match['over']:
    return math.gcd(int(match['number']), int(match['over'])) == 1
  return True


def _is_square_free(number: int) -> bool:
  """Tells whether no square divides a number; 1 has nothing to take a root of.

  Of a root up to 10**9 only squares of numbers up to 1000 are looked for.
  """
  return number > 1 and all(number % (n * n) for n in range(2, 1001))


def solved(answer: str, reference: str) -> str:
  r"""Returns '5' of '7^{999} \equiv 5 \pmod{13}', and most answers unchanged.

  Args:
    answer: one that may name its problem before it, or its modulus after it.
    reference: nothing is taken away where it has an equation or a modulus.
  """
  if re.search(_MOD, reference) or '=' in reference:
    return answer
  if names_operation(answer, reference):
    answer = _last_side(answer)
  match = _MODULUS.fullmatch(answer.strip())
  # '18 \mod 13' is not computed, and 18 is no remainder.
  if match and int(match['number']) < int(match['modulus']):
    return match['number']
  return answer


def _last_side(text: str) -> str:
  depth, start = 0, 0
  for token in _RELATION.finditer(text):
    depth += (token.lastgroup == 'open') - (token.lastgroup == 'close')
    if token.lastgroup == 'equal' and depth == 0:
      start = token.end()
  return text[start:]


def contradicts_itself(
    answer: str, parse_number: Callable[[str], tuple[object, bool] | None]
) -> bool:
  """Tells whether two sides of a chain are numbers, and not the same one.

  Args:
    answer: '6 = 5', 'x = 6 = 5'; a verifier takes the last side alone.
    parse_number: reads a side that is a plain number.
  """
  sides = [parse_number(side.strip()) for side in answer.split('=')]
  return len({side for side in sides if side is not None}) > 1


def names_operation(answer: str, reference: str) -> bool:
  """Tells whether an answer has a kind of operation the reference has not."""
  return any(
      kind.search(answer) and not kind.search(reference) for kind in _KINDS
  ) or any(
      has.search(answer) and not allows.search(reference)
      for has, allows in _PAIRS
  )
