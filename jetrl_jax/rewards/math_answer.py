r"""Is the final answer of a response the reference answer?

A response's answer is what its last `\boxed{...}` holds, else what follows its
last `####`. Numbers, fractions and equal texts are decided here, exactly, a
sentence's full stop and words after a number left out; everything else
goes to math-verify, which parses LaTeX with a grammar and compares with SymPy.

The text comes from a model under optimisation, so it is treated as hostile:

* It is never evaluated. math-verify's plain-expression mode hands text to
  SymPy's `parse_expr`, which is Python's `eval`; it is not used, and while an
  answer is being compared the two places where SymPy runs generated code are
  shut.
* Forms that take for ever (`rewards/costly.py`), or that would pass an unsolved
  problem off as its answer (`rewards/problems.py`), are refused unless the
  reference has them too. What a rule can refuse a clock must not decide: a
  clock makes the score depend on the machine.
* The rest is bounded by the process it runs in (`rewards/pool.py`). The time
  limits of math-verify are off: they are signals, which do not stop work in C.
"""

import contextlib
import dataclasses
import fractions
import functools
import importlib
import re
import threading
from collections.abc import Iterator
from typing import Any

from jetrl_jax.rewards import answer_list, costly, problems

# Held while SymPy's modules are changed.
_ONE_AT_A_TIME = threading.Lock()

# float_rounding of math-verify: two decimals this close are equal to it.
_ROUNDING = fractions.Fraction(1, 10**6)

_NUMBER = re.compile(
    r'(?P<sign>[+-]?)'
    r'(?P<whole>[1-9]\d{0,2}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)?'
    r'(?P<decimals>\.\d+)?(?:[eE](?P<power>[+-]?\d{1,2}))?(?P<percent>%?)',
    re.ASCII,
)
# '3,14', '0,125', '1.234,5': a comma that parts no groups of three digits.
_DECIMAL_COMMA = re.compile(
    r'(?P<whole>[+-]?(?:[1-9]\d{0,2}(?:[. ]\d{3})+|0|\d{4,}'
    r'|\d+(?=,(?!\d{3}(?!\d))))),(?P<decimals>\d+)(?P<percent> ?\\?%)?',
    re.ASCII,
)
_COUNTED = re.compile(
    r'(?P<number>[+-]?\\?\$?[\d.,]*\d)(?P<words>(?:[ -][a-z]{2,})+)'
    # Of an area or a volume.
    r'(?:(?<= [cmk]m| ft| in| yd)\^\{?[23]\}?)?',
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
# '5 more' counts, '5 or more' is a range, and '5 over two' a fraction.
_GOES_ON = re.compile(
    r'^or (?:more|less|fewer|greater)$|^(?:minus|plus|times|over|point) (?:zero'
    r'|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve)$'
)
_MULTIPLES = {
    'dozen': 12,
    'hundred': 10**2,
    'thousand': 10**3,
    'million': 10**6,
    'billion': 10**9,
    'trillion': 10**12,
}
# Longer than any number that is an answer, and its sentence.
_TAIL_CHARS = 1000
# What stands in a word, an index or an exponent is skipped; a minus after a
# digit, a letter or a bracket is none of the number's.
_LAST_NUMBER = re.compile(
    r'(?:[a-zA-Z]|[\^_]\s*\{?-?)\d[\d.,]*'
    r'|(?P<number>(?:(?<![\w)}\]])-)?'
    r'(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![a-zA-Z])\.\d+)'
    r'(?:/\d+)?)',
    re.ASCII,
)
# What ends a sentence, and LaTeX's spaces.
_END = re.compile(r'(?:\\[,;:! ]|[,;:~\s]|(?<!\.)(?<!\\right)\.)+$')
_ABOUT = re.compile(
    r'^(?:=|\\(?:approx|simeq|displaystyle|large|Large)(?![a-zA-Z])'
    # Old LaTeX; of a letter a vector.
    r'|\\(?:bf|it|rm|sf)(?![a-zA-Z])(?=\s*[-\d.]))\s*'
)
_DOTS = re.compile(r'\\[lc]?dots(?![a-zA-Z])|\.\.\.|\u2026')
# 'B. 12', '(B) 12', 'Option B': a choice, where the reference is a letter.
_CHOICE = re.compile(
    r'(?:option|choice|answer)?:?\s*(?:\(([A-J])\)|([A-J])(?=[.):]|$)).*',
    re.DOTALL | re.IGNORECASE,
)
_LETTER = re.compile(r'\(?([A-J])\)?')
_WORD = re.compile(r'[a-zA-Z]{2,}(?: [a-zA-Z]+)*')
# Units of which another is another answer: a line has the spellings of one.
_SPELLINGS = """
mm millimeter millimetre
cm centimeter centimetre
dm decimeter decimetre
m meter metre
km kilometer kilometre
in inch inches
ft foot feet
yd yard
mi mile
s sec second
min minute
h hr hour
day
week
month
year yr
mg milligram
g gm gram
kg kilogram
oz ounce
lb pound
ton tonne
mL ml milliliter millilitre
L liter litre
pint
quart
gallon
acre
hectare
degree
radian
"""
_UNITS = {
    word + plural: line.split()[0]
    for line in _SPELLINGS.strip().splitlines()
    for word in line.split()
    for plural in (('', 's') if len(word) > 1 else ('',))
}
_LONGEST_FIRST = sorted(_UNITS, key=len, reverse=True)
_ANY_UNIT = '|'.join(_LONGEST_FIRST)
_UNIT_WORD = '|'.join(word for word in _LONGEST_FIRST if len(word) > 2)
_SPACES = r'\s*(?:(?:\\[,;: ]|~|-)\s*)*'
_IN_TEXT = r'\\(?:text|mathrm|mbox)\s*\{\s*'
_SIZED = r'(?:(?:square|sq\.?|cubic|cu\.?)\s+)?'
# Outside of \text 'm' is a unit only after a lone number: '2m+3h' has none.
_UNIT = re.compile(
    rf'[\d.}})$]{_SPACES}(?:{_IN_TEXT}{_SIZED}(?P<text>{_ANY_UNIT})\s*\}}'
    rf'|(?:{_IN_TEXT})?{_SIZED}(?P<word>{_UNIT_WORD})(?![a-zA-Z]))'
    rf'|^\$?-?[\d.,/]+\$?{_SPACES}{_SIZED}(?P<plain>{_ANY_UNIT})'
    r'\.?(?:\^\{?\d\}?)?\s*$'
)
# The 's' of '1+3s', but not of '2 s' and of '1st'.
_VARIABLE_LAST = re.compile(r'(?<![a-zA-Z\\])[a-zA-Z]{1,2}\s*$')
_QUANTITY = re.compile(
    r'-?(?:[\d.,/]+|\\[dt]?frac\s*\{\d+\}\s*\{\d+\})\s*'
    rf'(?:{_ANY_UNIT}|am|pm|cc|rs|st|nd|rd|th)\s*'
)
_TEXT = re.compile(r'\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{([^{}]*)\}')
_FONT = re.compile(
    r'\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|it|rm|sf|tt)|[mh]box|bm'
    r'|boldsymbol|underline)\s*(?=\{)'
)
_COMMAND = re.compile(r'\\(?:begin|end)\s*\{\w+\}|\\[a-zA-Z]+')
_DELIMITED = re.compile(
    r'\\\((?P<round>(?:(?!\\[()]).)*)\\\)|\\\[(?P<square>(?:(?!\\[\[\]]).)*)\\\]'
    r'|\$\$(?P<two>[^$]*)\$\$|\$(?P<one>[^$]+)\$',
    re.DOTALL,
)
# 'x = 5', 'a_1 = 5'; where the reference is a value, the name says nothing.
_NAMED = re.compile(
    r'(?:\\[a-zA-Z]+|[a-zA-Z])(?:_\{?\w\}?)?\s*'
    r'(?:=|\\approx(?![a-zA-Z]))(?P<value>[^=]+)'
)
# '4210_5', '4210_{\text{five}}': digits and their base.
_BASED = re.compile(
    r'\(?(?P<digits>[0-9A-F]+)\)?_(?:(?P<one>\d)|\{(?:\\text\s*\{)?\s*'
    r'(?:base\s*\}?\s*)?(?P<base>\d{1,2}|[a-z]+)\s*\}{1,2})',
    re.ASCII,
)
# The space below a row of a matrix: '\\[4pt]'.
_ROW_SPACE = re.compile(r'(?<=\\\\)\s*\[-?[\d.]{1,6}\s*(?:pt|em|ex|mm|cm|in)\]')
_BASES = (
    'zero one two three four five six seven eight nine ten eleven twelve'
    ' thirteen fourteen fifteen sixteen'.split()
)
_REPEATING = re.compile(
    r'(?P<sign>-?)(?P<whole>\d{0,20})\.(?P<once>\d{0,20})'
    r'\\(?:overline|bar)\{?(?P<again>\d{1,20})\}?',
    re.ASCII,
)
# '\frac13'.
_SHORT = re.compile(r'\\[dt]?frac\s*(\d)\s*(\d)', re.ASCII)
_PERCENT = re.compile(r'\s*\\?%$')
_COLON = re.compile(r' ?(?::|\\colon(?![a-zA-Z])) ?')
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


def extract_answer(response: str) -> str:
  r"""Returns the final answer of a response, '' if it has none.

  Args:
    response: the model's text, of any length.

  Returns:
    What the last `\boxed{}` or `\fbox{}` encloses, braces balanced; without
    one, the rest of the line after the last '####'. An answer that is not
    closed or longer than `costly.MAX_ANSWER_CHARS` is none.
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
  line = response[start + 4 : start + 4 + costly.MAX_ANSWER_CHARS + 1]
  line = line.split('\n', 1)[0]
  if len(line) > costly.MAX_ANSWER_CHARS:
    return ''
  return line.strip(' \t\r*')  # Asterisks are Markdown's bold face.


def last_number(response: str) -> str:
  r"""Returns the last number of a response as it is written, '' without one.

  '42' of 'The answer is 42.', '-1,234.5' and '3/4' as a whole. What is written
  into a word, an index or an exponent ('H2O', 'x_1', '5 m^2') is no number.
  """
  tail = response[-_TAIL_CHARS:].replace('{,}', ',').replace('\u2212', '-')
  tail = problems.with_slashes(re.sub(r'\\!\s*', '', tail))
  found = [match['number'] for match in _LAST_NUMBER.finditer(tail)]
  return next((number for number in reversed(found) if number), '')


def parse_last(text: str) -> fractions.Fraction | None:
  """Returns the value of the number that `last_number` found."""
  above, _, below = text.partition('/')
  number = parse_number(above)
  if number is None or (below and not int(below[:100])):
    return None
  return number[0] / int(below[:100]) if below else number[0]


def _enclosed(text: str, start: int) -> str:
  """Returns the inside of the brace group that opens at `start`."""
  text = text[start : start + costly.MAX_ANSWER_CHARS + 16].lstrip()
  if bare := re.match(r'[\w.,+-]+', text):  # '\boxed 5'
    return bare[0].rstrip('.,')
  answer = text[1 : _group_end(text)].strip()
  return answer if len(answer) <= costly.MAX_ANSWER_CHARS else ''


def _group_end(text: str) -> int:
  """Returns where the brace group that opens a text closes, 0 if nowhere."""
  if not text.startswith('{'):
    return 0
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
        return index
  return 0


def parse_number(text: str) -> tuple[fractions.Fraction, bool] | None:
  r"""Reads a plain number: '1,234.50', '-\$3', '7\%'; None for all else.

  Args:
    text: an answer.

  Returns:
    The exact value without the percent sign, and whether there was one.
  """
  if len(text) > 100:
    return None
  text = re.sub(r'\\!\s*', '', text.replace('{,}', ','))
  text = re.sub(r'\\[ ,;]', ' ', text).replace('\\', '').replace('$', '')
  if re.search(r'\s,|,\s', text):  # A list.
    return None
  match = _NUMBER.fullmatch(_compact(text).rstrip('.'))
  if match is None or not (match['whole'] or match['decimals']):
    return None
  whole = re.sub('[, ]', '', match['whole'] or '0')
  digits = f'{match["sign"]}{whole}{match["decimals"] or ""}'
  value = fractions.Fraction(f'{digits}e{match["power"] or 0}')
  return value, bool(match['percent'])


def is_refused(answer: str, reference: str, prompt: str = '') -> bool:
  """Tells whether the answer is of a form that no verifier is given.

  Args:
    answer: the model's final answer, see `extract_answer`.
    reference: the data set's.
    prompt: what the model was asked; a formula copied from it is no answer,
      but where the reference is that formula or another of the prompt. An
      equation that is left to solve, 'x^2 = 4', is one only where the prompt
      asks for its left side.
  """
  # A verifier never gets the left side of '\\binom{10}{3} = 120'.
  answer, reference = costly.in_latex(answer), costly.in_latex(reference)
  answer = costly.without_redundant_braces(answer)
  is_choice = parse_number(reference) is None and problems.is_in(
      reference, costly.in_latex(prompt)
  )
  if not is_choice and problems.is_copied(answer, costly.in_latex(prompt)):
    return True
  if any(
      problems.is_unsolved(entry, reference, costly.in_latex(prompt))
      for entry in answer_list.entries(answer, braces=True)
  ):
    return True
  answer = problems.solved(answer, reference)
  return costly.is_costly(answer, reference) or problems.names_operation(
      answer, reference
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
  answer, reference = costly.in_latex(answer), costly.in_latex(reference)
  answer = _plainly(problems.solved(answer, reference))
  reference = _plainly(reference)
  if _DOTS.search(answer) and not _DOTS.search(reference):
    return False
  if letter := _LETTER.fullmatch(_unwrapped(reference)):
    choice = _CHOICE.fullmatch(_unwrapped(answer).strip())
    if choice and (choice[1] or choice[2]).upper() == letter[1]:
      return True
  unit, other = _unit(answer), _unit(reference)
  if unit and other and unit != other:
    return False
  if union := answer_list.as_union(answer, reference):
    return answer_list.is_same(*union, is_right)
  wanted = answer_list.with_both_signs(answer_list.entries(reference))
  if len(wanted) > 1:
    found = answer_list.entries(answer, braces=True)
    found = answer_list.with_both_signs(found)
    if _is_same_text(answer, reference):
      return True
    if len(found) > 1:
      return answer_list.is_same(found, wanted, is_right)
    # '300,200,100' is a number, but beside a list of as many numbers three.
    groups = answer.replace('{,}', ',').split(',')
    if len(groups) == len(wanted) and _NUMBER.fullmatch(','.join(groups)):
      return answer_list.is_same(groups, wanted, is_right)
    if ',' not in answer:  # No tuple or set that is written otherwise.
      return False
  found, ratio = _ratio(answer), _ratio(reference)
  if found is not None and ratio is not None and len(ratio) > 2:
    return _is_same_ratio(found, ratio)
  if '=' not in reference:
    if problems.contradicts_itself(answer, parse_number):
      return False
    if named := _NAMED.fullmatch(answer):
      answer = _plainly(named['value'])
  # Beside a bare number only: elsewhere words may be the answer.
  if parse_number(reference):
    answer = _uncounted(answer)
  elif parse_number(answer):
    reference = _uncounted(reference)
  if len(wanted) == 1 and ',' not in reference:
    answer = _with_point(answer)
  decided = _compare_plain(answer, reference)
  if decided is not None:
    return decided
  math_verify, seed = _libraries()
  with _made_safe():
    # SymPy tests equality at random points; from a fixed seed an answer's
    # score does not depend on the answers before it.
    seed(0)
    try:
      return bool(
          math_verify.verify(
              list(_parse_reference(reference)),
              _parse(answer),
              timeout_seconds=None,
              # 'x < 3' for '(-\infty, 3)', as it is the other way round.
              allow_set_relation_comp=True,
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
  r"""Removes \text{} and similar commands, but not their arguments."""
  return _TEXT.sub(r'\1', text)


def _plainly(text: str) -> str:
  """Returns an answer without a sentence's end, mixed numbers as fractions."""
  text = costly.without_redundant_braces(text.strip())
  text = _ROW_SPACE.sub('', text)
  if '\\begin' not in text:  # Of aligned lines one alone: 'x &= 5'.
    text = text.replace('&=', '=')
  text = _END.sub('', text.replace('°', r'^\circ'))
  text = text.replace(r'\langle', '(').replace(r'\rangle', ')')
  text = _SHORT.sub(r'\\frac{\1}{\2}', _ABOUT.sub('', text))
  while True:
    if (inside := _without_font(text)) is not None:
      text = inside
    elif match := _DELIMITED.fullmatch(text):
      text = match[match.lastgroup or 0]
    else:
      break
    text = _END.sub('', text.strip())
  if match := _REPEATING.fullmatch(_compact(text)):
    return _repeating(match)
  value, percent = _without_percent(text)
  match = _MIXED.fullmatch(_compact(value))
  if match is None:
    return text
  whole = int(match['whole'])
  p, q = int(match['a'] or match['p']), int(match['b'] or match['q'])
  if p >= q:
    return text
  return rf'{match["sign"]}\frac{{{whole * q + p}}}{{{q}}}{percent}'


def _without_font(text: str) -> str | None:
  """Returns the inside of a font command; None without one, or for words.

  A letter alone may be a vector, and letters in a font of text are words.
  """
  match = _FONT.match(text)
  if match is None:
    return None
  group = text[match.end() :]
  if _group_end(group) != len(group) - 1:
    return None
  inside = group[1:-1]
  letters = _COMMAND.sub('', inside).strip()
  is_text = 'text' in match[0] or 'box' in match[0]
  words = '[a-zA-Z]' if is_text else '^[a-zA-Z]$|[a-zA-Z]{2}'
  return None if re.search(words, letters) else inside


def _repeating(match: re.Match[str]) -> str:
  r"""Returns '\frac{1}{3}' of '0.\overline{3}'."""
  once, again = match['once'], match['again']
  nines = 10 ** len(again) - 1
  value = int((match['whole'] or '0') + once) * nines + int(again)
  value = fractions.Fraction(value, nines * 10 ** len(once))
  return rf'{match["sign"]}\frac{{{value.numerator}}}{{{value.denominator}}}'


def _with_point(text: str) -> str:
  """Returns '1234.5' of '1.234,5'; the caller knows that it is no list."""
  match = _DECIMAL_COMMA.fullmatch(text.replace('{,}', ','))
  if match is None:
    return text
  whole = re.sub('[. ]', '', match['whole'])
  return f'{whole}.{match["decimals"]}{match["percent"] or ""}'


def _unit(text: str) -> str | None:
  """Returns the first unit's name, the same for all of its spellings."""
  match = _UNIT.search(text.rpartition('=')[2].strip())
  return match and _UNITS[match['text'] or match['word'] or match['plain']]


def _uncounted(text: str) -> str:
  """Removes a unit's words after a number.

  '5 million people' is 5000000 and '5 percent' 5%; with another word of
  `_FACTORS` the value is not known, and nothing is returned.
  """
  unwrapped = re.sub(r'\\(?:[,;:! ]|quad)|~', ' ', _unwrapped(text))
  match = _COUNTED.fullmatch(' '.join(unwrapped.split()))
  if match is None:
    return text
  words = re.split('[ -]', match['words'].lower().strip(' -'))
  if _GOES_ON.search(' '.join(words)):
    return ''
  factors = [word for word in words if word in _FACTORS]
  if not factors:
    return match['number']
  if words == ['percent']:
    return match['number'] + '%'
  number = parse_number(match['number'])
  if number and factors == words[:1] and factors[0] in _MULTIPLES:
    value = number[0] * _MULTIPLES[factors[0]]
    return rf'\frac{{{value.numerator}}}{{{value.denominator}}}'
  return ''


def _compare_plain(answer: str, reference: str) -> bool | None:
  """Compares texts and numbers; None leaves the case to math-verify."""
  if not answer:
    return False
  if _is_same_text(answer, reference):
    return True
  left, right = parse_number(answer), parse_number(reference)
  if left is not None and right is not None:
    if _is_same_share(left, right):
      return True
    (x, x_percent), (y, y_percent) = left, right
    return False if abs(x - y) > _ROUNDING and x_percent == y_percent else None
  if '/' in answer + reference or 'frac' in answer + reference:
    left, right = _parse_share(answer), _parse_share(reference)
    if left is not None and right is not None and _is_same_share(left, right):
      return True
    left, right = _parse_fraction(answer), _parse_fraction(reference)
    if left is not None and right is not None:
      return False
  left, right = _parse_based(answer), _parse_based(reference)
  if left is not None and right is not None:
    return left == right
  return None


def _ratio(text: str) -> list[fractions.Fraction] | None:
  """Returns the parts of '1:2:3'; None of a text that is no ratio."""
  # 'x:y:z = 1:2:3' and '(1:2:3)' are one, too.
  parts = _COLON.split(_compact(text.rpartition('=')[2]).strip(' $()'))
  numbers = [_parse_share(part) for part in parts]
  found = [n[0] for n in numbers if n and n[0] and not n[1]]
  # 0 is no part of a ratio, and neither is a percentage.
  return found if len(found) == len(parts) > 1 else None


def _is_same_ratio(
    answer: list[fractions.Fraction], reference: list[fractions.Fraction]
) -> bool:
  """Tells whether parts are the same, up to one factor: 2:4:6 is 1:2:3."""
  if len(answer) != len(reference):
    return False
  pairs = zip(answer, reference, strict=True)
  return len({x / y for x, y in pairs}) == 1


def _is_same_share(
    left: tuple[fractions.Fraction, bool],
    right: tuple[fractions.Fraction, bool],
) -> bool:
  """Compares two values, each with whether it has a percent sign.

  '50%' answers '50' and '0.5', as in math-verify.
  """
  (x, x_percent), (y, y_percent) = left, right
  return x == y or (
      x_percent != y_percent
      and (x if x_percent else y) / 100 == (y if x_percent else x)
  )


def _parse_share(text: str) -> tuple[fractions.Fraction, bool] | None:
  r"""Reads a plain number or a fraction, as `parse_number`: '\frac{1}{3}\%'."""
  number = parse_number(text)
  if number is not None:
    return number
  value, percent = _without_percent(text)
  fraction = _parse_fraction(value)
  return None if fraction is None else (fraction, bool(percent))


def _without_percent(text: str) -> tuple[str, str]:
  match = _PERCENT.search(text)
  return (text[: match.start()], match[0]) if match else (text, '')


def _is_same_text(answer: str, reference: str) -> bool:
  answer = _compact(_unwrapped(answer))
  reference = _compact(_unwrapped(reference))
  if answer == reference:
    return True
  # 'True' and 'true' are one word, 'A' and 'a' two letters.
  return bool(_WORD.fullmatch(reference)) and (
      answer.casefold() == reference.casefold()
  )


def _parse_fraction(text: str) -> fractions.Fraction | None:
  match = _FRACTION.fullmatch(_compact(text).strip('$'))
  if match is None or len(text) > 100:
    return None
  p, q = int(match['p'] or match['a']), int(match['q'] or match['b'])
  return None if q == 0 else fractions.Fraction(-p if match['sign'] else p, q)


def _parse_based(text: str) -> tuple[str, str] | None:
  """Returns the digits of '4210_5' and their base; of another it is asked."""
  match = _BASED.fullmatch(_compact(text))
  if match is None:
    return None
  base = match['one'] or match['base']
  if not base.isdecimal():
    if base not in _BASES:
      return None
    base = str(_BASES.index(base))
  return match['digits'], base


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
  if _VARIABLE_LAST.search(text) and not _QUANTITY.fullmatch(text):
    # Else 's' would be taken away from '1+3s', as the seconds.
    normal = dataclasses.replace(config.normalization_config, units=False)
    config = dataclasses.replace(config, normalization_config=normal)
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


def _solve_easy(relation: Any, symbols: Any) -> Any:
  """Stands in for `solve` where math-verify compares equations."""
  import sympy

  if costly.is_hard_equation(relation.lhs - relation.rhs):
    raise ValueError('this equation may take for ever to solve')
  return sympy.solve(relation, symbols)


@contextlib.contextmanager
def _made_safe() -> Iterator[None]:
  """Shuts the two places where SymPy runs code that it made from text.

  `sympify` of a string is `eval`, `lambdify` is `exec`; a name in the module
  hides the built-in one. latex2sympy makes its numbers through the first.
  Beside them, equations are solved only where that is quick.

  Modules and SymPy's random seed belong to the whole process, so threads take
  turns: those of an environment, or of a trainer that calls our rewards.
  """
  parser = importlib.import_module('sympy.parsing.sympy_parser')
  # sympy.utilities.lambdify is also a function of that name.
  lambdify = importlib.import_module('sympy.utilities.lambdify')
  grader = importlib.import_module('math_verify.grader')
  with _ONE_AT_A_TIME:
    solve = grader.solve
    vars(parser)['eval'] = _make_atom
    vars(lambdify)['exec'] = _refuse_code
    vars(grader)['solve'] = _solve_easy
    try:
      yield
    finally:
      del vars(parser)['eval'], vars(lambdify)['exec']
      vars(grader)['solve'] = solve
