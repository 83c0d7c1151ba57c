r"""Answers that are the problem: '7^{999} \mod 13' where 5 is asked for.

A verifier evaluates what it is given, and a policy would be paid for copying
the question into the box. So an answer that names an operation is none, unless
the reference names one of its kind: '\sin 15^\circ' may answer where the
reference has a cosine. '\binom{10}{3} = 120' has its answer on the last side.
Arithmetic that is left to do ('\frac{36}{2}', '\sqrt{16}', '2^{10}') is taken,
as by other verifiers: where a problem ends there, no text says. But not if it
stands so in the prompt.
"""

import math
import re
from collections.abc import Callable


def _command(*names: str) -> str:
  return rf'\\(?:{"|".join(names)})(?![a-zA-Z])'


_MOD = r'\\(?:[bp]?mod|pod)(?![a-zA-Z])|(?<![a-zA-Z\\])mod(?![a-zA-Z])'
_BAR = r'(?:\||\\[lr]?[vV]ert(?![a-zA-Z]))'
# Each kind: what the answer may not have where the reference has none of it.
_KINDS = tuple(
    re.compile(pattern)
    for pattern in (
        _command('i{1,3}nt', 'oint', 'partial', 'nabla')
        + r'|frac\s*\{?\s*d\s*\}?\s*\{?\s*d',
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
    r'(?:[a-zA-Z]=)?-?(?:\\sqrt\{(?P<root>\d{1,9})\}'
    r'|(?P<number>\d{1,9}(?:\.\d+)?)(?:(?<!\.\d)/(?P<over>[1-9]\d{0,8}))?)',
    re.ASCII,
)
# Something is left to do; a sign alone is a number's.
_OPERATION = re.compile(
    r'[+*/^=_<>!]|(?<=[\w)}\]])-|binom|'
    + _command('[dtc]?frac', 'sqrt', 'cdot', 'times', 'div', 'overline', 'bar')
)


def with_slashes(text: str) -> str:
  r"""Returns a text with '3/4' for '\frac{3}{4}' and '\dfrac34'."""
  return _FRAC.sub(lambda m: f'{m[1] or m[2]}/{m[3] or m[4]}', text)


def _in_one_writing(text: str) -> str:
  r"""Returns a text with '3/4' for '\frac{3}{4}', without thousands' braces."""
  text = _SQRT.sub(r'\\sqrt{\1}', text.replace('{,}', ','))
  return re.sub(r'\\[dtc]frac', r'\\frac', with_slashes(text))


def _written(text: str) -> str:
  return _LAYOUT.sub('', _in_one_writing(text)).rstrip('.,;:')


def is_in(formula: str, prompt: str) -> bool:
  """Returns whether a prompt contains a formula, in any layout.

  A part of a formula is none: '1/2' is not in '11/20', nor 'x=2' in 'x=2+4x'.
  """
  written = _written(formula)
  if not written:
    return False
  prompt = _in_one_writing(prompt)
  pattern = rf'(?:{_LAYOUT.pattern})*'.join(map(re.escape, written))
  return any(
      not _GOES_BEFORE.search(prompt[: match.start()])
      and not (written[0].isalpha() and _FACTOR.search(prompt[: match.start()]))
      and not _GOES_ON.match(prompt[match.end() :])
      for match in re.finditer(pattern, prompt)
  )


def is_copied(answer: str, prompt: str) -> bool:
  """Tells whether an answer with something left to do is in the prompt.

  Nothing is left to do in 'x = 3', a reduced fraction or the root of a number
  that is no square, and so nothing is won by copying it.
  """
  written = _written(answer)
  return (
      bool(_OPERATION.search(written))
      and not _is_finished(written)
      and is_in(answer, prompt)
  )


def _is_finished(written: str) -> bool:
  match = _FINISHED.fullmatch(written)
  if match is None:
    return False
  if match['root']:
    return math.isqrt(int(match['root'])) ** 2 != int(match['root'])
  if match['over']:
    return math.gcd(int(match['number']), int(match['over'])) == 1
  return True


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
