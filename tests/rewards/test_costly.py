"""Costs that can be told from a text, before anything parses it."""

import pytest

from jetrl_jax.rewards import costly, math_answer


@pytest.mark.parametrize(
    'answer, reference',
    [
        ('(1+i)^{999}', '18'),
        ('(1+i)^{10}', '18'),
        ('x^{50}+x^{49}-x+1=0', '18'),
        ('x^{50}', 'x^{24}+1'),
        (r'\theta_1^{10}', '18'),
        (r'\left(\sqrt2+1\right)^{10}', '18'),
        ('((x^5)^5)^5', '18'),
        ('(x+1)^5(x+2)^5', '18'),
        ('(' * 9 + '18' + ')' * 9, '18'),
        ('9^{9^9}', '18'),
        ('((10^{99})^{99})', '18'),
        (r'10^{99 \cdot 99}', '18'),
        ('/'.join('3' * 20), '18'),
        (r'\div '.join('3' * 20), '18'),
        ('10^9!', 'x+1'),
    ],
)
def test_degrees_and_depths_beyond_the_reference_are_refused(answer, reference):
  assert costly.is_costly(answer, reference)


@pytest.mark.parametrize(
    'answer, reference',
    [
        ('x^9 - x^8', '18'),
        ('(x+1)^4(x-1)^5', '18'),
        # Of numbers.
        ('2^{99}', '18'),
        ('2^{2008} - 2', '2^{2008}-2'),
        (r'\left(\frac{2}{3}\right)^{10}', '18'),
        ('(-2)^{11}', '18'),
        (r'3e^{12}\pi^{11}', '18'),
        # As far as the reference goes, multiplied out.
        (r'121z^{34} + 55z^{17}', r'11z^{17}(5+11z^{17})'),
        ('(' * 8 + '18' + ')' * 8, '18'),
    ],
)
def test_what_a_verifier_does_at_once_is_not_costly(answer, reference):
  assert not costly.is_costly(answer, reference)


def test_as_many_powers_as_the_reference_has_are_allowed():
  answer = '+'.join(f'{n}^2' for n in range(30))
  assert costly.is_costly(answer, '18')
  assert not costly.is_costly(answer, answer)


@pytest.mark.parametrize(
    'text, expected',
    [
        ('{' * 14 + '1' + '}' * 14, '1'),
        (r'\frac{{1}}{{{2}}}', r'\frac{1}{2}'),
        (r'{\frac{1}{2}}', r'\frac{1}{2}'),
        ('{{1}+{2}}', '{1}+{2}'),
        ('{1}{2}', '{1}{2}'),
        (r'\{\{1\}\}', r'\{\{1\}\}'),
        ('{{1}', '{{1}'),
        ('}{', '}{'),
        ('', ''),
    ],
)
def test_only_redundant_braces_are_removed(text, expected):
  assert costly.without_redundant_braces(text) == expected


def test_a_number_in_redundant_braces_is_that_number():
  answer = '{' * 14 + '18' + '}' * 14
  assert not math_answer.is_refused(answer, '18')
  assert math_answer.is_right(answer, '18.0')


@pytest.mark.parametrize(
    'equation, hard',
    [
        ('2*x + 3*y - 1', False),
        ('x**3 - y**2', False),
        ('1/x - y', False),
        ('x**4 - 1', True),
        ('1/(x**2 + 1) + 1/(x**2 - 3) - 2', True),
        ('sqrt(x) + sqrt(x + 1)', True),
        ('sin(x) - x', True),
        ('2**x - x', True),
        ('2**sqrt(3)', False),
    ],
)
def test_only_easy_equations_are_solved(equation, hard):
  sympy = pytest.importorskip('sympy')
  assert costly.is_hard_equation(sympy.sympify(equation)) == hard


def test_equations_of_one_line_or_circle_are_equal():
  for answer, reference in (
      ('y = 2x + 1', '4x - 2y + 2 = 0'),
      ('2x^2 + 2y^2 = 18', 'x^2 + y^2 - 9 = 0'),
      ('x + 1 > 3', 'x > 2'),
  ):
    assert math_answer.is_right(answer, reference), answer
