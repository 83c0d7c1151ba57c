"""Made-up lengths and scores: where they lie, and that they have an address."""

import numpy as np
import pytest

from jetrl_jax.data import Prompt
from jetrl_jax.rl import synthetic

PROMPTS = [
    Prompt(
        id=i,
        tokens=np.ones(1, np.int32),
        text='',
        answer='',
        source='',
        extra={},
    )
    for i in range(1024)
]


def _lengths(prompts, lengths: str, step: int = 1):
  return synthetic.response_limits(3, step, prompts, 8, 16384, lengths)


@pytest.mark.parametrize(
    'lengths, mean, longest',
    [('uniform', 0.75, (0.98, 1.0)), ('long_tail', 0.125, (0.5, 1.0))],
)
def test_lengths_are_spread_as_they_say(lengths, mean, longest):
  found = _lengths(PROMPTS, lengths) / 16384
  assert found.shape == (1024, 8)
  assert found.min() > 0
  np.testing.assert_allclose(found.mean(), mean, rtol=0.05)
  assert longest[0] < found.max() <= longest[1]


def test_a_length_depends_on_prompt_and_step_alone():
  many = _lengths(PROMPTS, 'long_tail')
  np.testing.assert_array_equal(many[5:7], _lengths(PROMPTS[5:7], 'long_tail'))
  assert (many != _lengths(PROMPTS, 'long_tail', step=2)).any()


@pytest.mark.parametrize('samples', [4, 5, 16])
def test_no_two_answers_of_a_step_share_a_number(samples):
  scores = synthetic.scores(3, 1, PROMPTS, samples)
  assert len(np.unique(scores)) == scores.size
