import dataclasses
import functools
import os
import signal

import numpy as np
import pytest

from jetrl_jax.core.interrupt import StopRequested
from jetrl_jax.data import Prompt
from jetrl_jax.rl.scoring import dynamic_sampling, experience, store
from jetrl_jax.rl.scoring.dynamic_sampling import NotEnoughGroupsError
from jetrl_jax.rl.settings import AlgorithmConfig, FilterGroups, OverlongBuffer
from jetrl_jax.rl.training.collector import Collector
from jetrl_jax.rl.types import Completion
from tests import whole_run
from tests.rl import replay

CONFIG = AlgorithmConfig(filter_groups=FilterGroups(enable=True))


def _scored(first: int, accuracy, scores=None, errors=None, config=CONFIG):
  """Scored groups of prompts first, first + 1, ...; lengths 1, 2, 3, ..."""
  accuracy_PG = np.asarray(accuracy, np.float64)
  prompts = [
      Prompt(
          id=first + p,
          tokens=np.asarray([5], np.int32),
          text='',
          answer='',
          source='',
          extra={},
      )
      for p in range(len(accuracy_PG))
  ]
  completions = []
  for prompt in prompts:
    for g in range(accuracy_PG.shape[1]):
      values = np.zeros(g + 1, np.float32)
      completions.append(
          Completion(
              prompt_id=prompt.id,
              sample=g,
              prompt_tokens=prompt.tokens,
              tokens=values.astype(np.int32),
              sampled=np.ones(g + 1, bool),
              log_mu=values,
              logprobs=values,
              weight_version=values.astype(np.int32),
              finish_reason='stop',
          )
      )
  scores = accuracy_PG if scores is None else np.asarray(scores, np.float64)
  return experience.from_scores(
      prompts,
      completions,
      scores.reshape(-1),
      accuracy_PG.reshape(-1),
      errors or {},
      config,
  )


def _fill(batches, groups, config=CONFIG):
  return dynamic_sampling.fill(iter(batches), groups=groups, config=config)


def test_a_group_is_mixed_if_some_and_not_all_are_right():
  found = dynamic_sampling.mixed_groups(
      np.array([[0, 0, 0], [1, 1, 1], [1, 0, 1], [0.5, 0.5, 0.5]])
  )
  np.testing.assert_array_equal(found, [False, False, True, False])


def test_answers_without_a_score_make_no_group_mixed():
  nan = np.nan
  groups = [[nan, 0, 0], [1, nan, 1], [1, nan, 0], [nan, nan, nan]]
  found = dynamic_sampling.mixed_groups(np.array(groups))
  np.testing.assert_array_equal(found, [False, False, True, False])
  filled = _fill([_scored(0, groups)], 1)
  assert [p.id for p in filled.experience.prompts] == [2]
  advantages = filled.experience.advantages_PG
  assert np.sign(advantages).tolist() == [[1, 0, -1]]
  assert filled.metrics == {
      'training/num_gen_batches': 1,
      'training/filter_groups/dropped_frac': 3 / 4,
      'training/filter_groups/all_right_frac': 1 / 4,
      'training/filter_groups/generated_acc': 0.5,
  }
  with pytest.raises(
      NotEnoughGroupsError, match='1 all right, 1 without a score, 1 otherwise'
  ):
    _fill([_scored(0, groups)], 2)


def test_the_batch_is_the_first_mixed_groups_that_were_drawn():
  filled = _fill(
      [
          _scored(0, [[0, 0], [1, 0], [1, 1]], errors={'timeout': 1}),
          _scored(3, [[0, 1], [1, 0], [0, 1]], errors={'timeout': 2}),
          _scored(6, [[0, 1]]),
      ],
      groups=3,
  )
  exp = filled.experience
  assert [p.id for p in exp.prompts] == [1, 3, 4]
  assert [(c.prompt_id, c.sample) for c in exp.completions] == [
      (1, 0), (1, 1), (3, 0), (3, 1), (4, 0), (4, 1),
  ]  # fmt: skip
  np.testing.assert_array_equal(exp.accuracy_PG, [[1, 0], [0, 1], [1, 0]])
  assert np.sign(exp.advantages_PG).tolist() == [[1, -1], [-1, 1], [1, -1]]
  # The third batch was not needed. Two of six groups were of one outcome.
  assert filled.metrics == {
      'training/num_gen_batches': 2,
      'training/filter_groups/dropped_frac': pytest.approx(2 / 6),
      'training/filter_groups/all_right_frac': pytest.approx(1 / 6),
      'training/filter_groups/generated_acc': 0.5,
  }
  assert exp.errors == {'timeout': 3}
  assert len(filled.prompts) == 6 and len(filled.completions) == 12


def test_reward_functions_describe_the_groups_that_were_kept():
  applied = dataclasses.replace(
      _scored(0, [[0, 1], [1, 1]]),
      parts_PG={'length': np.array([[3.0, 4.0], [9.0, 9.0]])},
  )
  kept = _fill([applied, _scored(2, [[1, 0]])], groups=2).experience
  # It applied to nothing in the second batch.
  np.testing.assert_array_equal(
      kept.parts_PG['length'], [[3.0, 4.0], [np.nan, np.nan]]
  )


def test_outcomes_are_judged_by_accuracy_before_shaping():
  # Both right, of other lengths: the penalty alone would tell them apart.
  config = dataclasses.replace(
      CONFIG,
      overlong_buffer=OverlongBuffer(
          enable=True, len=2, max_response_length=2, penalty_factor=1.0
      ),
  )
  unmixed = _scored(0, [[1, 1]], config=config)
  np.testing.assert_array_equal(unmixed.rewards_PG, [[0.5, 0.0]])
  assert unmixed.advantages_PG.any()
  mixed = _scored(1, [[0, 1]], config=config)
  exp = _fill([unmixed, mixed], 1, config).experience
  assert [p.id for p in exp.prompts] == [1]
  # Shaped once, though gathered from batches that were shaped: 0 - 1/2, 1 - 1.
  np.testing.assert_array_equal(exp.scores_PG, [[0, 1]])
  np.testing.assert_array_equal(exp.rewards_PG, [[-0.5, 0]])
  metrics = experience.experience_metrics(exp)
  assert metrics['critic/overlong_penalty/mean'] == -0.75
  assert metrics['critic/overlong_penalty/frac'] == 1.0
  assert metrics['critic/rewards/max'] == 0.0


def test_whitening_sees_the_groups_that_were_kept_and_no_others():
  config = dataclasses.replace(
      CONFIG, adv_estimator='reinforce_plus_plus_baseline'
  )
  batches = [
      _scored(0, [[0, 0]], scores=[[9, 5]], config=config),
      _scored(1, [[0, 1], [1, 0]], scores=[[0, 2], [3, 1]], config=config),
  ]
  exp = _fill(batches, 2, config).experience
  for name in ('advantages_PG', 'scores_PG', 'accuracy_PG'):
    np.testing.assert_array_equal(
        getattr(exp, name), getattr(batches[1], name), err_msg=name
    )


def test_without_the_filter_one_batch_is_taken_as_it_is():
  batch = _scored(0, [[0, 0], [1, 0]])
  filled = _fill([batch], 2, AlgorithmConfig())
  assert filled.experience is batch and filled.metrics == {}
  assert filled.prompts is batch.prompts
  assert filled.completions is batch.completions


def test_a_batch_that_cannot_be_filled_ends_the_run_in_a_sentence():
  dull = [_scored(3 * i, [[0, 0], [1, 1], [0, 1]]) for i in range(3)]
  capped, free = (
      dataclasses.replace(
          CONFIG, filter_groups=FilterGroups(enable=True, max_num_gen_batches=n)
      )
      for n in (2, 0)
  )
  with pytest.raises(
      NotEnoughGroupsError,
      match='found 2 of 3 groups with mixed outcomes in 2 generation batches .6'
      ' groups: 2 all right, 2 otherwise equal., and algorithm.filter_groups'
      '.max_num_gen_batches is 2. The prompts are too easy or too hard',
  ):
    _fill(dull, 3, capped)
  assert len(_fill(dull, 3, free).experience.prompts) == 3
  for config in (CONFIG, free):
    with pytest.raises(NotEnoughGroupsError, match='in 3 .* every prompt was'):
      _fill(dull, 4, config)


# --- in a run ----------------------------------------------------------------


@pytest.fixture(scope='module')
def changes(tmp_path_factory) -> dict:
  path = tmp_path_factory.mktemp('filter') / 'rewards.py'
  path.write_text(
      'def third(data_source, solution_str, ground_truth, extra_info):\n'
      '  digits = sum(c.isdigit() for c in solution_str)\n'
      "  return {'score': digits / 12, 'acc': float(digits % 3 == 0)}\n"
  )
  return {
      'reward.functions': (f'{path}:third',),
      'reward.overlong_buffer.enable': True,
      'reward.overlong_buffer.len': 4,
      'algorithm.filter_groups.enable': True,
      'trainer.total_training_steps': 3,
      'trainer.test_freq': 0,
  }


def _stop_at_score(monkeypatch, number: int) -> None:
  """Sends a real SIGTERM while the n-th generation batch is scored."""
  score, calls = Collector.score, []

  def stop(*arguments):
    calls.append(arguments)
    if len(calls) == number:
      os.kill(os.getpid(), signal.SIGTERM)
    return score(*arguments)

  monkeypatch.setattr(Collector, 'score', stop)


def test_a_run_fills_its_batches_and_resumes_to_the_same_bits(
    tmp_path, changes, monkeypatch
):
  whole, stopped = tmp_path / 'whole', tmp_path / 'stopped'
  trainer = functools.partial(whole_run.trainer, changes=changes)
  whole_trainer = trainer(whole)
  whole_trainer.train()
  steps = whole_run.records(whole)[1:]
  batches = [r['training/num_gen_batches'] for r in steps]
  assert max(batches) > 1
  for record, number in zip(steps, batches, strict=True):
    assert record['training/mismatch_token_frac'] == 0.0
    assert record['critic/acc/mean'] not in (0.0, 1.0)
    dropped = record['training/filter_groups/dropped_frac']
    assert (dropped > 0) == (number > 1)
  for file in sorted((whole / 'rollouts').iterdir()):
    completions, extra = store.load_rollouts(file)
    assert len({c.prompt_id for c in completions}) == 4
    accuracy_PG = extra['accuracy'].reshape(4, 4)
    assert dynamic_sampling.mixed_groups(accuracy_PG).all()
    spec = whole_trainer.spec
    exp = replay.load_experience(file, spec.train_set, spec.algorithm)
    assert (exp.rewards_PG <= exp.scores_PG).all()
  # Between the first and the second generation batch of a step.
  first = next(i for i, number in enumerate(batches) if number > 1)
  interrupted = trainer(stopped)
  with monkeypatch.context() as patched, pytest.raises(StopRequested):
    _stop_at_score(patched, sum(batches[:first]) + 1)
    interrupted.train()
  assert whole_run.restored(stopped, changes=changes).step == first
  trainer(stopped).train()
  assert whole_run.outcome(stopped, changes) == whole_run.outcome(
      whole, changes
  )


def test_a_run_that_finds_no_lessons_ends_after_a_checkpoint(tmp_path, changes):
  path = tmp_path / 'rewards.py'
  path.write_text(
      'def all_right(data_source, solution_str, ground_truth, extra_info):\n'
      '  return 1.0\n'
  )
  changes = changes | {'reward.functions': (f'{path}:all_right',)}
  trainer = whole_run.trainer(tmp_path / 'run', changes)
  with pytest.raises(
      NotEnoughGroupsError, match=r'0 of 4 .* 3 gen.* .10 groups: 10 all rig'
  ):
    trainer.train()
  # The position is that of the step's start, not after ten prompts.
  found = whole_run.restored(tmp_path / 'run', changes=changes)
  assert found.step == 0 and found.host_state['sampler']['position'] == 0
