r"""Answers that are the problem: '7^{999} \mod 13' where 5 is asked for.

A verifier evaluates what it is given, and a policy would be paid for copying
the question into the box. So an answer that names an operation is none, unless
the reference names one of its kind: '\sin 15^\circ' may answer where the
reference has a cosine. '\binom{10}{3} = 120' has its answer on the last side.
Arithmetic that is left to do ('\frac{36}{2}', '\sqrt{16}', '2^{10}') is taken,
as by other verifiers: where a problem ends there, no text says. But not if it
stands so in the prompt.
"""

import re


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
        # What is counted: binomials and factorials; '\!' is a space.
        r'binom(?![a-zA-Z])|\\choose|(?<!\\)!(?!=)|' + _command('[gG]amma'),
        _command('(?:arc|ar)?(?:sin|cos|tan|cot|sec|csc)h?'),
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
# Something is left to do; a sign alone is a number's.
_OPERATION = re.compile(
    r'[+*/^=_<>]|(?<=[\w)}\]])-|'
    + _command('[dtc]?frac', 'sqrt', 'cdot', 'times', 'div', 'overline', 'bar')
)


def _written(text: str) -> str:
  text = _LAYOUT.sub('', text).replace('{,}', ',').rstrip('.,;:')
  return re.sub(r'\\[dtc]frac', r'\\frac', text)


def is_in(formula: str, prompt: str) -> bool:
  """Returns whether a prompt contains a formula, in any layout."""
  return bool(formula) and _written(formula) in _written(prompt)


def is_copied(answer: str, prompt: str) -> bool:
  """Tells whether an answer with something left to do is in the prompt."""
  return bool(_OPERATION.search(_written(answer))) and is_in(answer, prompt)


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


def names_operation(answer: str, reference: str) -> bool:
  """Tells whether an answer has a kind of operation the reference has not."""
  return any(
      kind.search(answer) and not kind.search(reference) for kind in _KINDS
  ) or any(
      has.search(answer) and not allows.search(reference)
      for has, allows in _PAIRS
  )
