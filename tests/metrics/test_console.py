"""What a run prints."""

from jetrl_jax.metrics.console import before_and_after


def test_what_a_resumed_run_began_to_measure_has_no_before():
  one, four = 'val-core/heldout/acc/mean@1', 'val-core/heldout/acc/mean@4'
  first = {'step': 0, one: 0.5, f'{one}/ci95': 0.1}
  assert before_and_after(first, first | {one: 0.625}) == [
      f'{one}: 50.0% before, 62.5% after'
  ]
  last = {'step': 8, four: 0.75, 'val-core/game/reward/mean@4': 1.5}
  assert before_and_after(first, last) == [
      f'{four}: 75.0% after',
      'val-core/game/reward/mean@4: 1.5000 after',
  ]


def test_an_evaluation_that_was_not_the_first_is_not_called_before():
  one = 'val-core/heldout/acc/mean@1'
  # metrics.jsonl was emptied; what is left begins at step 6.
  alone = {'step': 6, one: 1.0}
  assert before_and_after(alone, alone) == [f'{one}: 100.0% after']
  assert before_and_after(alone, {'step': 8, one: 0.5}) == [
      f'{one}: 100.0% at step 6, 50.0% after'
  ]
