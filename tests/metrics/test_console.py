"""What a run prints."""

import re
import time

from jetrl_jax.metrics.console import Progress, before_and_after


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


def test_an_evaluation_before_the_last_step_is_not_called_after():
  one = 'val-core/heldout/acc/mean@1'
  first, last = {'step': 0, one: 0.5}, {'step': 6, one: 0.75}
  # Resumed with trainer.test_freq=0.
  assert before_and_after(first, last, 9) == [
      f'{one}: 50.0% before, 75.0% at step 6 of 9'
  ]
  assert before_and_after(first, first, 9) == [f'{one}: 50.0% at step 0 of 9']


def test_a_reward_in_the_place_of_an_accuracy_is_no_share():
  one = 'val-core/heldout/acc/mean@1'
  first, last = {'step': 0, one: 0.5}, {'step': 6, one: 17.375}
  assert before_and_after(first, last) == [
      f'{one}: 0.5000 before, 17.3750 after'
  ]


def test_a_long_task_says_a_line_now_and_then_also_while_it_waits(capsys):
  shown = Progress('answers', 8, every_s=0.05)
  shown.update(0)
  time.sleep(0.2)
  shown.update(2, 'accuracy so far 50.0%')
  time.sleep(0.2)
  shown.close()
  lines = capsys.readouterr().err.splitlines()
  assert lines[0] == 'answers: 0 of 8, 0 s'
  assert re.fullmatch(
      r'answers: 2 of 8, \d s, about [12] s left, accuracy so far 50.0%',
      lines[-1],
  )
  assert not any('left' in line for line in lines if '0 of 8' in line)
