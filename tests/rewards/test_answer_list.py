"""Lists: what is one, and what its entries are."""

import pytest

from jetrl_jax.rewards import answer_list


@pytest.mark.parametrize(
    'text, expected',
    [
        ('1,-2', ['1', '-2']),
        (r'-1, \; -5', ['-1', '-5']),
        ('x=1; x=2', ['x=1', 'x=2']),
        (r'2, 3, \text{ and } 4', ['2', '3', '4']),
        (r'6, 8\text{, and }10', ['6', '8', '10']),
        ('3 or -3', ['3', '-3']),
        (r'\text{A, D}', [r'\text{A}', r'\text{D}']),
        (r'\text{1, 2}', ['1', '2']),
        # A comma before groups of three is the number's.
        ('58,500', ['58,500']),
        ('1,000, 2,000', ['1000', '2000']),
        ('1,000,2', ['1', '000', '2']),
        ('100, 200', ['100', '200']),
        ('0,100', ['0', '100']),
        # Commas in brackets part nothing.
        ('(1,2)', ['(1,2)']),
        (r'x \in [-2,7)', [r'x \in [-2,7)']),
        (r'\left(1,2\right), f(3,4)', [r'\left(1,2\right)', 'f(3,4)']),
        (r'\langle 1,2 \rangle', [r'\langle 1,2 \rangle']),
        (
            r'\begin{pmatrix} 1,2 \end{pmatrix}',
            [r'\begin{pmatrix} 1,2 \end{pmatrix}'],
        ),
        # Nor do those of brackets that do not fit.
        ('1),(2', ['1),(2']),
        ('(1,2', ['(1,2']),
        # Words that only contain a separator, and lone separators.
        ('orange', ['orange']),
        (r'\sqrt{2}\land 3', [r'\sqrt{2}\land 3']),
        ('5,', ['5,']),
        (',', [',']),
    ],
)
def test_a_list_is_split_at_its_top_level(text, expected):
  assert answer_list.entries(text) == expected


def test_braces_are_a_list_only_where_asked_for():
  text = r'\left\{1, 2\right\}'
  assert answer_list.entries(text) == [text]
  assert answer_list.entries(text, braces=True) == ['1', '2']
  two = r'\{1\},\{2\}'
  assert answer_list.entries(two) == [r'\{1\}', r'\{2\}']


def test_both_signs_are_written_out_where_there_is_one_such_sign():
  found = answer_list.with_both_signs([r'1 \pm x', '2', r'y=\mp3'])
  assert found == ['1 + x', '1 - x', '2', 'y=-3', 'y=3']
  # Nobody says which of two signs go together.
  two = [r'\pm 1 \pm x']
  assert answer_list.with_both_signs(two) == two
