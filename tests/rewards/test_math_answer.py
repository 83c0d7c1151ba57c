import dataclasses
import fractions
import itertools
from concurrent import futures

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetrl_jax.rewards import RewardRequest, costly, functions, math_answer

# What breaks readers of LaTeX, more often than chance would have it.
_LATEX = st.lists(
    st.sampled_from(
        ['\\boxed', '\\fbox', '####', '{', '}', '\\', '$', '%', ',', '.', '-']
        + ['\n', ' ', '0', '7', '\\frac', '^', '\u0663']
    )
    | st.text(max_size=3),
    max_size=30,
).map(''.join)
_NUMBERS = (
    [
        '0.25',
        '12',
        '3.5',
        '.5',
        '7',
        '1,000',
        '-2',
        '1/2',
        '5\\text{ cm}',
        '10:30',
    ]
    + [
        '\\sqrt{8}',
        '2\\sqrt3',
        '\\pi',
        'x',
        '\\frac{1}{2}',
        '30^\\circ',
        '10\\%',
    ]
    + ['(4)', '0', '12_8', '5!', '']
)
_BETWEEN = [
    '/',
    '*',
    '+',
    '-',
    '^',
    ':',
    '=',
    '<',
    ' ',
    ',',
    '\\times ',
    '\\div ',
]


@pytest.mark.parametrize(
    'response, answer',
    [
        (r'\boxed{18}', '18'),
        (r'first \boxed{1}, then \boxed{\frac{1}{2}}.', r'\frac{1}{2}'),
        (r'\boxed {\sqrt{\frac{a}{b}}} done', r'\sqrt{\frac{a}{b}}'),
        (r'\fbox{7}', '7'),
        (r'\boxed{\left\{1,2\right\}}', r'\left\{1,2\right\}'),
        # An escaped brace encloses nothing.
        (r'\boxed{\{} x', r'\{'),
        ('work\n#### 1,234\n', '1,234'),
        ('#### 1\n#### 2', '2'),
        # A box counts before a heading.
        ('\\boxed{3}\n#### Check', '3'),
        ('nothing', ''),
        ('####', ''),
        ('#### 5', '5'),
        # Cut off by the length limit: not an earlier box instead.
        (r'\boxed{1} \boxed{2', ''),
        (r'so \boxed 5.', '5'),
        ('#### **5**', '5'),
        (r'\boxed{' + 'x' * 512 + '}', 'x' * 512),
        (r'\boxed{' + 'x' * 513 + '}', ''),
        ('####' + ' 1' * 300, ''),
    ],
)
def test_the_answer_is_in_the_last_box_or_after_the_marks(response, answer):
  assert math_answer.extract_answer(response) == answer


@pytest.mark.parametrize(
    'text, value, percent',
    [
        ('18', 18, False),
        ('-1,234.50', -1234.5, False),
        (r'\$1{,}000', 1000, False),
        ('$ 3.', 3, False),
        ('.25', 0.25, False),
        (r'7\%', 7, True),
        ('+2', 2, False),
        ('1.5e3', 1500, False),
        ('125e-3', 0.125, False),
    ],
)
def test_plain_numbers_are_read_exactly(text, value, percent):
  assert math_answer.parse_number(text) == (value, percent)


@pytest.mark.parametrize(
    'text',
    ['', '.', '-', '1,23', '1.2.3', '1e500', 'x', '٣', '1' * 101, '1/2', '7 2']
    + ['1, 000', '1 ,000', r'1,\,000', '0,100', '000,100'],
)
def test_other_texts_are_not_plain_numbers(text):
  assert math_answer.parse_number(text) is None


@pytest.mark.parametrize(
    'answer, reference',
    [
        ('18', '18.0'),
        ('1,000', '1000'),
        (r'\$18', '18'),
        (r'50\%', '50'),
        (r'50\%', '0.5'),
        ('1/2', r'\frac{1}{2}'),
        (r'\frac{2}{4}', r'\dfrac{1}{2}'),
        ('0.5', r'\frac{1}{2}'),
        ('0.333333', r'\frac{1}{3}'),
        (r'3\sqrt{2}', r'\sqrt{18}'),
        ('x=5', '5'),
        ('(x+1)^2', 'x^2+2x+1'),
        (r'\left( 3, \frac{\pi}{2} \right)', r'(3,\frac{\pi}{2})'),
        (r'\text{(B)}', r'\text{B}'),
        (r'18 \text{ cm}', '18'),
        (r'\{2,1\}', r'\{1,2\}'),
        (r'90^\circ', '90'),
        ('90°', '90'),
        ('1 1/2', r'\frac{3}{2}'),
        (r'-1\frac{1}{2}', '-1.5'),
        ('1 000', '1000'),
        (r'10,\!000', '10000'),
        (r'-\frac{5}{3}', r'-\frac{5}{3}.'),
        ('$3/4$.', r'\frac{3}{4}'),
        ('October 30', r'\text{October 30}'),
        ('A, B', r'\text{A,B}'),
        ('18 dollars', '18'),
        ('$18.00 each day.', '18'),
        ('18', '18 people'),
        # A number in a font of its own is that number.
        (r'\text{27}', '27.0'),
        (r'\mathbf{-1,234}.', '-1234.0'),
        (r'$\textbf{1/2}$', '0.5'),
        (r'\text{27.}', '27.0'),
        (r'\textbf{\text{27}}', '27.0'),
        ('27', r'\text{27.0}'),
        (r'\text{27}, \text{5}', '5.0, 27.0'),
        # So is a formula, but for words in it.
        (r'\mathbf{x^3-10x}', 'x^3-10x'),
        (
            r'\mathbf{\begin{pmatrix} 7 \\ -1 \end{pmatrix}}',
            r'\begin{pmatrix} 7 \\ -1 \end{pmatrix}',
        ),
        (r'\mathbf{\frac{17}{24}}', r'\frac{17}{24}'),
        (r'\boldsymbol{3\sqrt{2}}', r'3\sqrt{2}'),
        (r'\text{$\frac{1}{2}$}', '0.5'),
        (r'\text{\(\frac{1}{2}\)}.', '0.5'),
        # What stands around a formula or before a number.
        (r'\(95,\!040\)', '95040'),
        (r'\[\frac{1}{2}\]', '0.5'),
        ('$$5$$', '5.0'),
        (r'\((1,3) \cup [4,5)\)', r'(1,3) \cup [4,5)'),
        # Inequalities with 'or' between them, for a union of intervals.
        ('x < 2 or x > 3', r'(-\infty, 2) \cup (3, \infty)'),
        (r'x > 3 \text{ or } x < 2', r'(-\infty, 2) \cup (3, \infty)'),
        (r'0 < n < 9 or 9 < n \le 36', r'(0,9)\cup(9,36]'),
        ('x = 98,634', '98634'),
        (r'x_1 = 33,\!800', '33800'),
        (r'\theta = \text{27}', '27.0'),
        # What a number counts.
        ('5 cm^2', '5'),
        (r'5\,\text{cm}^3', '5'),
        ('2 dozen eggs', '24'),
        ('7 percent', r'7\%'),
        (r'1.5 \text{ million}', '1,500,000'),
        # A base is a number, too.
        (r'4210_{\text{five}}', '4210_5'),
        (r'0.\overline{3}', r'\frac{1}{3}'),
        (r'-1.2\overline{45}', r'-\frac{137}{110}'),
        # Symbols that LaTeX writes as commands.
        ('2√3', r'2\sqrt{3}'),
        ('√(x+1)', r'\sqrt{x+1}'),
        ('√ {12}', r'2\sqrt{3}'),
        ('½', '0.5'),
        ('(−∞, 3]', r'(-\infty,3]'),
        (r'\varnothing', r'\emptyset'),
        # A decimal comma, where the reference is no list.
        ('3,14', '3.14'),
        ('-0,125', '-0.125'),
        ('0,5', r'\frac{1}{2}'),
        ('1.234,5', '1234.5'),
        ('1 234,5', '1234.5'),
        (r'3{,}14\%', r'3.14\%'),
        ('3,14 metres', '3.14'),
        # A bare list has no order, and a root as often as it occurs.
        ('-2, 1', '1,-2'),
        ('300, 200, 100', '100, 200, 300'),
        ('3, -1, 3', '-1,3,3'),
        (r'\{2, 1\}', '1,2'),
        ('1,2', r'\{2,1\}'),
        (r'2, 3, \text{ and } 4', '4,2,3'),
        ('x = 3 or x = 2', '2,3'),
        (r'5, \; -11', r'5,\,-11'),
        ('1000, 2000', '1,000, 2,000'),
        ('E, H', r'\text{H, E}'),
        ('Softball, Picnic', r'\text{Softball, Picnic}'),
        (r'120^\circ, 60^\circ', '60, 120'),
        (r'1 \pm \sqrt{5}', r'1 - \sqrt{5}, 1 + \sqrt{5}'),
        ('(1, 2), (3, 4)', '(3,4), (1,2)'),
        # The same text but for spaces.
        ('58, 500', '58,500'),
        (r'11,\! 111,\! 100', '11111100'),
        # A name before a value that is no number, and both signs of a root.
        (r'x = \frac{-1 \pm \sqrt{5}}{2}', r'\frac{-1\pm\sqrt{5}}{2}'),
        (r'\frac{-1\pm\sqrt5}{2}', r'\frac{-1-\sqrt5}{2}, \frac{-1+\sqrt5}{2}'),
        (r'x=\pm 2 \text{ or } x=3', '-2,2,3'),
        (r'\pm 2', '2,-2'),
        (r'x=\text{(B)}', r'\text{(B)}'),
        # About, and other characters for what LaTeX writes.
        (r'x \approx 3.14', '3.14'),
        ('\u2248 3.14', '3.14'),
        ('\u20135', '-5'),
        ('\u215b', r'\frac18'),
        ('x\u2074', 'x^4'),
        ('10\u207b\u00b3', '0.001'),
        (r'\underline{5}~', '5'),
        (r'\langle 1,2\rangle', '(1,2)'),
        (r'\frac{10}{2}=5', '5'),
        # A choice with what it says; words in any case.
        ('B. 12', 'B'),
        (r'\textbf{(B)}\ 12', 'B'),
        ('Option B', r'\text{(B)}'),
        ('True', r'\text{true}'),
        # Inequalities of one letter, and intervals.
        ('x<3', r'(-\infty,3)'),
        (r'1\le x\le 2', '[1,2]'),
        # Closed forms of letters.
        (r'\binom{n}{2}', r'\frac{n(n-1)}{2}'),
        (r'\cosh x', r'\frac{e^x+e^{-x}}{2}'),
        # The reference's own form is allowed, however costly.
        (r'2^{2008} - 2', '2^{2008}-2'),
    ],
)
def test_equal_answers_are_right(answer, reference):
  assert not math_answer.is_refused(answer, reference)
  assert math_answer.is_right(answer, reference)


@pytest.mark.parametrize(
    'answer, reference',
    [
        ('', '18'),
        ('17', '18'),
        ('1800', '18'),
        ('0.5001', '0.5'),
        ('(1,2)', '(2,1)'),
        ('x', 'y'),
        (r'\frac{1}{0}', '1'),
        (r'\frac{1}', '1'),
        (r'\sqrt{2}', '1.414'),
        ('1 1/2', '11/2'),
        ('3 1/2', '31/2'),
        ('7 2', '72'),
        ('18 million', '18'),
        ('18 or 19', '18'),
        # Not the union: both at once, an end left out, two variables, one half.
        ('x < 2 and x > 3', r'(-\infty, 2) \cup (3, \infty)'),
        (r'x \le 2 or x > 3', r'(-\infty, 2) \cup (3, \infty)'),
        ('x < 2 or y > 3', r'(-\infty, 2) \cup (3, \infty)'),
        ('x < 2', r'(-\infty, 2) \cup (3, \infty)'),
        ('x < 2 or x < 2', r'(-\infty, 2) \cup (3, \infty)'),
        # What multiplies a number is no name of what is counted.
        (r'5 \text{ million}', '5'),
        (r'5 \text{ hundred people}', '5'),
        (r'5 \text{ squared}', '5'),
        ('4210_6', '4210_5'),
        ('4210_{6}', '4210_{5}'),
        (r'101_{\text{three}}', '101_2'),
        ('29_8', '25_8'),
        # To write it so is the problem.
        ('555_{10}', '4210_5'),
        (r'0.\overline{3}', '0.3'),
        (r'\text{√2}', '2'),
        ('√ ()', '2'),
        (r'\(5\) and \(6\)', '5'),
        (r'\mathbf{x}', r'\mathbf{y}'),
        (r'\mathbf{AB}', r'BA'),
        (r'\text{27}', '27.5'),
        # Letters in a word are no product.
        (r'\text{evil}', r'\text{vile}'),
        # A comma before three digits parts thousands; in a reference it may
        # part a list, which '3.14' is not.
        ('3,142', '3.142'),
        ('12,345', '12.345'),
        ('3.14', '3,14'),
        ('3,14', '314'),
        ('3, 14', '3.14'),
        ('1,2,3', '1.23'),
        ('1.23,4', '123.4'),
        # A list is not one number.
        ('2, 100', '2100'),
        ('32, 349', '32349.0'),
        ('2, 100', r'2,\!100.0'),
        ('2100', '2, 100'),
        (r'2,\,100', '2100'),
        ('81256', '81, 256'),
        ('-1,3', '-1,3,3'),
        (r'\{-1,3\}', '-1,3,3'),
        ('-1,-1,3', '-1,3,3'),
        ('75', '75, 75'),
        ('1,2,3', '1,2'),
        ('2,1', '(1,2)'),
        ('(2,1), (3,4)', '(1,2), (3,4)'),
        ('2', r'\pm 2'),
        (r'\pm 2', '2'),
        # A verifier takes the last side alone.
        ('6=5', '5'),
        ('x=6=5', '5'),
        (r'5\ldots', '5'),
        (r'5\text{ m}', r'5\text{ cm}'),
        ('A. 12', 'B'),
        ('Bad', 'B'),
        ('x<3', r'(-\infty,3]'),
        ('Picnic, Softball', r'\text{Softball, Picnic}'),
    ],
)
def test_other_answers_are_wrong(answer, reference):
  assert not math_answer.is_right(answer, reference)


@pytest.mark.parametrize(
    'answer',
    [
        r'\int_0^{18} 1\,dx',
        r'\lim_{x\to 18} x',
        r'\sum_{n=1}^{18} 1',
        r'\frac{d}{dx} 18x',
        r'7^{999}\mod 19',
        r'7^{999} \bmod 19',
        r'37 \pmod{19}',
        r'37 mod 19',
        r'\begin{vmatrix} 20 & 2 \\ 1 & 1 \end{vmatrix}',
        r'\det\begin{pmatrix} 20 & 2 \\ 1 & 1 \end{pmatrix}',
        r'\left| \begin{array}{cc} 20 & 2 \\ 1 & 1 \end{array} \right|',
        r'\lfloor 18.7 \rfloor',
        r'\left\lceil 17.2 \right\rceil',
        r'\binom{18}{1}',
        r'{18 \choose 1}',
        r'\frac{18!}{17!}',
        '3 * 3!',
        r'\gcd(36,54)',
        r'\max(18,3)',
        r'|-18|',
        r'\left|-\frac{36}{2}\right|',
        r'\log_2 2^{18}',
        r'18 \sin 90^\circ',
        r'\frac{18^{999}}{18^{998}}',
        '⌊18.7⌋',
        '⌈17.2⌉',
        '((((x³)³)³)³)³',
        r'18 + 0 \cdot 2^{100}',
        '9^{9^9}',
        '2^{1000}',
        '1000!',
        '(3!)!',
        '1' * 102,
        '(' * 9 + '18' + ')' * 9,
        'x' * 513,
    ],
)
def test_a_problem_is_not_an_answer(answer):
  assert math_answer.is_refused(answer, '18')


@pytest.mark.parametrize(
    'answer',
    [
        r'\frac{3\sqrt{2}}{2}',
        '-6t^4 +11t^3 -19t^2 +17t -10',
        'x^9+y^2',
        r'(-\infty, 3] \cup [4, 5)',
        r'\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}',
        r'\begin{pmatrix}1\\2\end{pmatrix} + \begin{pmatrix}t\\4\end{pmatrix}',
        '2^{99}',
        r'10,\!000',
        r'|x - 3|',
        r'\{x \mid x > 3\}',
        r'15 \text{ min}',
        'x \\neq 3',
        'x != 3',
        r'\text{determined}',
        r'\text{model}',
        # The answer is there.
        r'\binom{10}{3} = \frac{10!}{3!7!} = 120',
        r'7^{2024} \equiv 5 \pmod{13}',
        r'\int_0^{18} 1\,dx = 18',
        r'5 \pmod{13}',
    ],
)
def test_what_answers_look_like_is_not_refused(answer):
  assert not math_answer.is_refused(answer, '18')


@pytest.mark.parametrize(
    'answer, reference',
    [
        (r'\binom{10}{3}', r'\binom{10}{7}'),
        (r'\frac{10!}{3!7!}', r'\binom{10}{3}'),
        (r'\tan x', r'\frac{\sin x}{\cos x}'),
        (r'2\ln 3', r'\ln 9'),
        (r'\exp(2)', 'e^2'),
        ('2^{100}', '4^{50}'),
        (r'|3 - x|', r'|x - 3|'),
        (r'5 \pmod{13}', r'5 \pmod{13}'),
        # Its own value is an answer, whatever stands before and after.
        (r'\binom{10}{3} = 120', '120'),
        (r'\sum_{n=1}^{3} n = 6', '6'),
        (r'7^{2024} \equiv 5 \pmod{13}', '5'),
        (r'5\ (\text{mod } 13)', '5'),
        (r'\log_2 8 = 3.', '3'),
    ],
)
def test_an_operation_that_the_reference_has_or_that_is_done_is_an_answer(
    answer, reference
):
  assert not math_answer.is_refused(answer, reference)
  assert math_answer.is_right(answer, reference)


@pytest.mark.parametrize(
    'answer, reference',
    [
        ('x^2 = 4', '4'),
        ('$x^{2}=4$.', '4'),
        ('x^2 = 4 = 4', '4'),
        ('x + 1 = 4', '4'),
        (r'2x - 3 = \frac{1}{4}', '0.25'),
        (r'\sqrt{x} = 4', '4'),
        (r'\frac{1}{x} = 4', '4'),
        ('2^x = 8', '8'),
        ('(x-1)(x+1) = 0', '0'),
        ('y^2 = 2x + 1', '2x+1'),
        (r'x = 2 \text{ or } x^2 = 4', '2,4'),
    ],
)
def test_an_equation_in_one_variable_is_no_answer_before_it_is_solved(
    answer, reference
):
  # A verifier takes the last side alone.
  assert math_answer.is_right(answer, reference)
  assert math_answer.is_refused(answer, reference)
  assert math_answer.is_refused(answer, reference, 'Solve $x^2 = 16 - 3x^2$.')


@pytest.mark.parametrize(
    'answer, reference',
    [
        ('x=4', '4'),
        ('x_1 = 4', '4'),
        ('f(x)=x^2', 'x^2'),
        ('f(2) = 7', '7'),
        ('f^{-1}(3) = 7', '7'),
        ("f'(2) = 3", '3'),
        ('y = 2x+1', '2x+1'),
        (r'\angle ABC = 30', '30'),
        ('AB = 5', '5'),
        ('BC^2 = 4', '4'),
        ('|AB| = 5', '5'),
        ('P(A) = 1/2', '1/2'),
        # Arithmetic, with its result last.
        ('2+2=4', '4'),
        ('x = 2 + 2 = 4', '4'),
        ('i^2 = -1', '-1'),
        # Several variables are what a problem asks for; so may a multiple be.
        ('a + b = 5', '5'),
        ('x^2 + y^2 = 25', '25'),
        ('xy = 6', '6'),
        ('3x = 12', '12'),
        (r'\frac{x}{2} = 4', '4'),
        # An equation beside an equation.
        ('x^2 = 4', 'x^2=4'),
        ('x^2 + y^2 = 4', 'y^2+x^2=4'),
    ],
)
def test_an_equation_passes_for_its_right_side_after_what_was_asked_for(
    answer, reference
):
  assert not math_answer.is_refused(answer, reference)
  assert math_answer.is_right(answer, reference)


@pytest.mark.parametrize(
    'answer, prompt, refused',
    [
        ('x^2 = 4', 'If $3x^2 = 12$, find $x^2$.', False),
        ('x^{2} = 4', 'Find $x^{2}$.', False),
        ('x + 1 = 4', 'What is $x+1$ if $2x = 6$?', False),
        (
            r'(x+\frac{1}{x})^2 = 4',
            r'Find $\left(x+\frac{1}{x}\right)^2$ if $x = 1$.',
            False,
        ),
        # The side of an equation, or a part of a formula, is not asked for.
        ('x^2 = 4', 'If $x^2 = 16/4$, find $x+2$.', True),
        ('x^2 = 4', 'If $4 = x^2$, find $x+2$.', True),
        ('x^2 = 4', 'If $x^2$ = $16/4$, find $x+2$.', True),
        ('x^2 = 4', 'Find $x^2 + 2x$.', True),
        ('3x = 12', 'Solve $3x + 1 = 13$.', False),
    ],
)
def test_a_side_that_the_prompt_asks_for_is_answered_by_an_equation(
    answer, prompt, refused
):
  reference = answer.split()[-1]
  assert math_answer.is_refused(answer, reference, prompt) == refused
  assert math_answer.is_right(answer, reference)


_PROMPT = (
    'Compute $\\displaystyle \\dfrac{84}{144}$. Is $x^2 - 1$ or\n$(x-2)(x+1)$ '
    'larger? (A) $16^{7/4}$ (B) $0.\\overline{73}$, 1,000 and $a + b = 5$.'
)


@pytest.mark.parametrize(
    'answer, reference',
    [
        (r'\frac{84}{144}', r'\frac{7}{12}'),
        ('16^{7/4}.', '128'),
        (r'0.\overline{73}', r'\frac{73}{99}'),
        ('$a+b=5$', '5'),
        ('x^2-1', '(x+1)(x-1)'),
    ],
)
def test_a_formula_of_the_prompt_is_no_answer(answer, reference):
  assert not math_answer.is_refused(answer, reference)
  assert math_answer.is_right(answer, reference)
  assert math_answer.is_refused(answer, reference, _PROMPT)


@pytest.mark.parametrize(
    'answer, reference',
    [
        # The reference is one of the prompt's formulas, or a number.
        ('x^2 - 1', 'x^2-1'),
        (r'\frac{84}{144}', r'\dfrac{84}{144}'),
        ('1,000', '1000.0'),
        ('(A)', 'A'),
        # Another way to write it is not the prompt's.
        (r'\frac{42}{72}', r'\frac{7}{12}'),
        (r'\frac{7}{12}', r'\frac{7}{12}'),
    ],
)
def test_an_answer_that_the_prompt_may_hold_is_not_refused(answer, reference):
  assert not math_answer.is_refused(answer, reference, _PROMPT)


@pytest.mark.parametrize(
    'answer, reference, prompt',
    [
        ('x=0', '0', 'Solve $7x=0$.'),
        ('x = 2', '2', 'Solve $5x=2+4x$.'),
        ('n=4', '4', 'Solve n=4n-12.'),
        ('1/2', r'\frac{1}{2}', 'What is 11/20 - 1/20?'),
        # Nothing is left to do.
        (r'\frac{3}{4}', r'\frac34', 'Which of 7/10, 4/5 and 3/4 is it?'),
        (r'\sqrt{2}', r'\sqrt2', r'Which of $\sqrt{2}$, $\frac75$ is larger?'),
        ('y=0', '0', 'Evaluate $y(y-3x)$ for $x=3$ and $y=0$.'),
        (r'30^\circ', '30', r'Two angles are $30^\circ$ and $120^\circ$.'),
        (r'12\text{ cm}^2', '12', r'One has $12\text{ cm}^2$. And it?'),
        (r'2\sqrt{3}', r'\sqrt{12}', r'A side of $2\sqrt3$ is given.'),
        (r'1+\sqrt2', r'\sqrt2+1', r'Let $r = 1+\sqrt{2}$. What is $r$?'),
        (r'\frac{\pi}{3}', r'\pi/3', r'An angle is $\frac{\pi}{3}$.'),
        ('x > 3', r'(3,\infty)', 'Where $x > 3$, it is larger.'),
    ],
)
def test_a_finished_number_is_an_answer_wherever_it_stands(
    answer, reference, prompt
):
  assert not math_answer.is_refused(answer, reference, prompt)
  assert math_answer.is_right(answer, reference)


@pytest.mark.parametrize(
    'answer, reference, prompt',
    [
        ('36/2', '18', r'What is $\frac{36}{2}$?'),
        (r'\dfrac{36}{2}', '18', 'What is 36/2?'),
        (r'\frac46', r'\frac23', r'Simplify $\frac{4}{6}$.'),
        ('1 + 17', '18', 'What is 1+17?'),
        (r'\sqrt{16}', '4', r'Compute $\sqrt{16}$.'),
        (r'\binom{n}{2}', r'\frac{n(n-1)}{2}', r'Expand $\binom{n}{2}$.'),
        (r'12\cdot 13', '156', r'Compute $12\times 13$.'),
        (r'144^{1/2}', '12', r'What is $\sqrt{144}$?'),
        (r'1/\sqrt2', r'\frac{\sqrt2}{2}', r'Rationalize $\frac{1}{\sqrt2}$.'),
        (r'\frac{48}{6}', '8', r'Compute $48\div 6$.'),
        ('(2+2)', '4', 'What is 2 + 2?'),
        ('{2}+{2}', '4', 'What is 2+2?'),
        ('(x + 1)^{2}', 'x^2+2x+1', 'Expand $(x+1)^2$.'),
        (r'3\cdot(x+2)', '3x+6', 'Expand $3(x+2)$.'),
        (r'\sqrt{50}', r'5\sqrt2', r'Simplify $\sqrt{50}$.'),
    ],
)
def test_a_formula_of_the_prompt_is_refused_in_another_writing(
    answer, reference, prompt
):
  assert math_answer.is_right(answer, reference)
  assert math_answer.is_refused(answer, reference, prompt)


@pytest.mark.parametrize(
    'answer, reference',
    [
        (r'\frac{\mathrm{d}}{\mathrm{d}x}(x^3)', '3x^2'),
        (r'\frac{d x^2}{dx}', '2x'),
        (r'\frac{{\rm d}}{{\rm d}x} x^2', '2x'),
        (r'\frac{d^2}{dx^2} x^3', '6x'),
    ],
)
def test_a_derivative_is_no_answer_in_any_font(answer, reference):
  assert math_answer.is_refused(answer, reference)


@pytest.mark.parametrize('answer', [r'\frac{3d}{4}', r'\frac{d}{e}', 'd/2'])
def test_a_letter_d_in_a_fraction_is_no_derivative(answer):
  assert not math_answer.is_refused(answer, 'f/5')


@pytest.mark.parametrize(
    'answer, reference, right',
    [
        ('300,200,100', '100, 200, 300', True),
        ('100,200,400', '100, 200, 300', False),
        ('100, 200, 300', '100200300', False),
        ('2:4:6', '1:2:3', True),
        ('1:3:2', '1:2:3', False),
        ('1:2', '1:2:3', False),
        ('x:y:z = 1:2:3', '1:2:3', True),
        ('(1:2:3)', '1:2:3', True),
        ('10:30:00', '10:30:00', True),
        (r'33\frac{1}{3}\%', r'33\frac13', True),
        (r'\frac{200}{3}\%', r'66\frac23\%', True),
        (r'33\frac{1}{3}\%', r'\frac{1}{3}', True),
        (r'33\frac{1}{3}\%', r'34\frac13', False),
        ('= 25', '25', True),
        (r'{\bf 25}', '25', True),
        (r'{\bf 25}', '26', False),
        (r'204_{\text{base }5}', '204_5', True),
        (r'204_{\text{base }6}', '204_5', False),
        ('x &= 5', '5', True),
        ('x &= 6', '5', False),
        (
            r'\begin{pmatrix}1\\[4pt]2\end{pmatrix}',
            r'\begin{pmatrix}1\\2\end{pmatrix}',
            True,
        ),
        ('5 or more', '5', False),
        ('5 minus one', '5', False),
        ('5 over two', '5', False),
        ('5 more', '5', True),
        ('5 times', '5', True),
    ],
)
def test_lists_ratios_percentages_and_words(answer, reference, right):
  assert math_answer.is_right(answer, reference) == right


@pytest.mark.parametrize(
    ('answer', 'reference', 'right'),
    [
        ('5 hours', r'5\text{ minutes}', False),
        ('5 km', '5 m', False),
        (r'5\text{ feet}', r'5\text{ inches}', False),
        ('10 days', '10 weeks', False),
        (r'5\text{ hrs}', '5 hours', True),
        ('2h', r'2\text{ hours}', True),
        (r'12\text{ square feet}', r'12\text{ ft}^2', True),
        ('1.5 hours = 90 minutes', '90 minutes', True),
        ('5 hours', '5', True),
        ('5 kg', '5', True),
        ('5th', '5', True),
        ('5 pm', '5', True),
        ('10:30 AM', '10:30 am', True),
        (r'\frac{1}{2} m', r'\frac{1}{2}', True),
    ],
)
def test_a_quantity_of_another_unit_is_another(answer, reference, right):
  assert math_answer.is_right(answer, reference) == right


@pytest.mark.parametrize(
    ('answer', 'reference', 'right'),
    [
        ('3s+1', '1+3s', True),
        ('2g+3h', '3h+2g', True),
        ('3t+2', '2+3t', True),
        ('a+c+b', 'a + b + c', True),
        ('6ab', '6ba', True),
        ('2t', '2s', False),
        ('6ab', '6', False),
        ('3t', '3', False),
        (r'\sin^2 x', r'\sin^2 t', False),
        ('x^2 m', 'x^2 h', False),
    ],
)
def test_a_variable_is_no_unit(answer, reference, right):
  assert math_answer.is_right(answer, reference) == right


def test_the_reward_refuses_what_is_copied_from_its_prompt():
  request = RewardRequest(
      prompt_text=_PROMPT,
      response_text=r'\boxed{\frac{84}{144}}',
      answer=r'\frac{7}{12}',
      source='math',
      extra={},
  )
  assert functions.math(request).error == 'refused'
  other = dataclasses.replace(request, prompt_text='Reduce it.')
  assert functions.math(other).value == 1


def test_an_answer_at_which_the_judge_fails_counts_0(monkeypatch, caplog):
  def fail(*_):
    raise ZeroDivisionError('of a test')

  monkeypatch.setattr(math_answer, 'is_refused', fail)
  request = RewardRequest(
      prompt_text='1+1?',
      response_text=r'\boxed{2}',
      answer='2',
      source='math',
      extra={},
  )
  part = functions.math(request)
  assert (part.value, part.accuracy, part.error) == (0, 0, 'failed')
  assert "failed at the answer '2'" in caplog.text
  assert 'ZeroDivisionError: of a test' in caplog.text


def test_a_number_above_its_modulus_is_not_the_remainder():
  assert math_answer.is_refused(r'18 \mod 13', '18')
  assert math_answer.is_refused(r'18 \mod 13', '5')


@pytest.mark.parametrize(
    'response, number, value',
    [
        ('The answer is: 460', '460', 460),
        ('so $-1,234.50.', '-1,234.50', -1234.5),
        ('1{,}000 and 10,\\!000', '10,000', 10_000),
        ('between 10-42', '42', 42),
        ('x-3', '3', 3),
        ('f(2)-5', '5', 5),
        ('x = -3!', '-3', -3),
        ('\u22127', '-7', -7),
        ('5/8 of it', '5/8', 0.625),
        (r'-\frac{3}{4}', '-3/4', -0.75),
        (r'it is \frac34.', '3/4', 0.75),
        ('.5', '.5', 0.5),
        ('50%', '50', 50),
        # In a word, an index, an exponent.
        ('42 m^2 of H2O, x_1, 10^{-3}', '10', 10),
        ('Rs.42', '42', 42),
        ('1/0', '1/0', None),
        ('none', '', None),
        ('7 ' + 'x ' * 600, '', None),
        ('9' * 5000, '9' * 1000, None),
    ],
)
def test_the_last_number_is_read_with_its_sign_and_fraction(
    response, number, value
):
  found = math_answer.last_number(response)
  assert found == number
  assert math_answer.parse_last(found) == value


def test_no_text_is_evaluated_while_answers_are_compared(tmp_path, monkeypatch):
  sympy = pytest.importorskip('sympy')
  monkeypatch.chdir(tmp_path)
  code = "__import__('os').system('touch OWNED')"
  with math_answer._made_safe():
    with pytest.raises(ValueError, match='not evaluated'):
      sympy.sympify(code)
    with pytest.raises(ValueError, match='not run'):
      sympy.lambdify(sympy.Symbol('x'), sympy.Symbol('x') + 1)
    # Numbers come the same way and are needed.
    assert sympy.sympify('18') == 18
    assert sympy.sympify('x') == sympy.Symbol('x')
    assert sympy.sympify('1.5') == 1.5
  assert not list(tmp_path.iterdir())
  # Afterwards the process's own SymPy is whole again.
  assert sympy.sympify('x + 1').free_symbols


def test_no_hard_equation_is_solved_while_answers_are_compared():
  sympy = pytest.importorskip('sympy')
  grader = pytest.importorskip('math_verify.grader')
  x, solve = sympy.Symbol('x'), grader.solve
  with math_answer._made_safe():
    with pytest.raises(ValueError, match='may take for ever to solve'):
      grader.solve(sympy.Eq(x**5 - x, 1), [x])
    assert grader.solve(sympy.Eq(2 * x, 4), [x]) == [2]
  # Afterwards math-verify's own is back.
  assert grader.solve is solve


def test_answers_that_threads_compare_score_as_one_by_one():
  pytest.importorskip('math_verify')
  pairs = [
      (rf'\frac{{{n}\sqrt{{3}}}}{{{d}}}', rf'{m}\sqrt{{3}}/{d}')
      for n in range(1, 7)
      for m in (n, n + 1)
      for d in (2, 5)
  ] + [(f'(x+{n})^2', f'x^2+{2 * n}x+{n * n}') for n in range(1, 9)]
  expected = [math_answer.is_right(*pair) for pair in pairs]
  assert any(expected) and not all(expected)
  with futures.ThreadPoolExecutor(8) as pool:
    found = list(pool.map(lambda pair: math_answer.is_right(*pair), pairs * 2))
  assert found == expected * 2


@given(_LATEX, st.text('ab12+-= .', max_size=40), st.text('xyz ', max_size=9))
def test_whatever_stands_before_the_last_box_holds_the_answer(
    before, inside, after
):
  response = f'{before}}}\\boxed{{{inside}}}{after}'
  # `before` may end in a backslash, which the added brace takes.
  assert math_answer.extract_answer(response) == inside.strip()


@given(_LATEX, _LATEX)
def test_any_text_is_read_without_an_error(response, reference):
  answer = math_answer.extract_answer(response)
  assert len(answer) <= costly.MAX_ANSWER_CHARS
  assert answer in response
  math_answer.is_refused(answer, reference, f'What is {answer}?')
  number = math_answer.parse_number(answer)
  assert number is None or isinstance(number[0], fractions.Fraction)


@pytest.mark.parametrize('between', _BETWEEN)
def test_arithmetic_of_the_prompt_is_read_without_an_error(between):
  for left, right in itertools.product(_NUMBERS, _NUMBERS):
    answer = f'{left}{between}{right}'
    math_answer.is_refused(answer, '9', f'What is {answer}?')


@pytest.mark.parametrize(
    ('answer', 'refused'),
    [
        ('0.25/5', True),
        ('10.50/12', True),
        ('1.25', False),
        ('3/4', False),
        ('6/8', True),
        ('-x=0.125/4', True),
    ],
)
def test_a_fraction_of_a_decimal_is_left_to_work_out(answer, refused):
  assert math_answer.is_refused(answer, '9', f'What is {answer}?') == refused


@given(st.integers(-(10**12), 10**12), st.integers(0, 999))
def test_a_number_has_one_value_in_all_its_notations(whole, thousandths):
  sign = '-' if whole < 0 else ''
  value = fractions.Fraction(abs(whole)) + fractions.Fraction(thousandths, 1000)
  value = -value if whole < 0 else value
  plain = f'{sign}{abs(whole)}.{thousandths:03}'
  for text in (
      plain,
      f'{sign}{abs(whole):,}.{thousandths:03}',
      f'${plain}$',
      f' {plain}0.',
  ):
    assert math_answer.parse_number(text) == (value, False)
  assert math_answer.parse_number(f'{plain}\\%') == (value, True)
