"""The loop on the tiny config: what each setting does to whole steps.

What is compiled is shared with the other tests of whole runs, see
`tests/whole_run.py`; where a test changes a setting that is part of a program
it says so, because that is what it costs.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.checkpoint import arrays as checkpoint_arrays
from jetrl_jax.checkpoint import folder as checkpoint_folder
from jetrl_jax.core import rng
from jetrl_jax.core.compile_ahead import CompileAhead
from jetrl_jax.core.interrupt import StopRequested
from jetrl_jax.metrics import alarms
from jetrl_jax.metrics.timer import Timer
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl import aggregation
from jetrl_jax.rl.objective import policy_loss
from jetrl_jax.rl.packing import sequence_from_completion
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.run import preflight
from jetrl_jax.rl.run.calibration import Calibration
from jetrl_jax.rl.scoring import evaluation, experience, store
from jetrl_jax.rl.scoring.experience import Experience
from jetrl_jax.rl.settings import RunConfig
from jetrl_jax.rl.training.collector import Collector
from jetrl_jax.rl.training.learner import Learner
from jetrl_jax.rl.training.trainer import Trainer
from tests import compilations, whole_run
from tests.rl import replay


@pytest.fixture(scope='module')
def done():
  """The workdir of a finished run of 6 steps."""
  return whole_run.finished()


@dataclasses.dataclass
class _Live:
  """A trainer between steps 4 and 5, its state, and what step 5 learnt from."""

  trainer: Trainer
  state: TrainState
  exp: Experience

  def learn(self, **changes):
    """One update with other settings; the state stays alive."""
    state, result = self.result(**changes)
    return state, result.infos, result.train_logprobs

  def result(
      self,
      packed_rows=0,
      smaller_micro_batches=0,
      mini_batch_size=2,
      measure_mismatch='all',
      **algorithm,
  ):
    """Returns (state, all that the updates tell)."""
    learner = self.trainer.learner
    spec = learner.spec
    learner.spec = dataclasses.replace(
        spec,
        algorithm=dataclasses.replace(spec.algorithm, **algorithm),
        run=dataclasses.replace(
            spec.run,
            mini_batch_size=mini_batch_size,
            packed_rows=packed_rows,
            smaller_micro_batches=smaller_micro_batches,
            measure_mismatch=measure_mismatch,
        ),
    )
    try:
      return learner.learn(jax.tree.map(jnp.copy, self.state), self.exp)
    finally:
      learner.spec = spec


@pytest.fixture(scope='module')
def live(done, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('live') / 'run'
  shutil.copytree(done, workdir)
  shutil.rmtree(workdir / 'checkpoints' / '6')
  trainer = whole_run.trainer(workdir)
  trainer.ahead = CompileAhead(threads=0)
  with trainer.spec.make_rewards() as trainer.pool:
    state, step = trainer._resume_or_start()
    assert step == 4
    exp = replay.load_experience(
        done / 'rollouts' / '000005.npz',
        trainer.spec.train_set,
        trainer.spec.algorithm,
    )
    yield _Live(trainer, state, exp)
  trainer.close()


def _same_bits(exp, scored) -> bool:
  return all(
      np.array_equal(
          scored[i][len(c.prompt_tokens) :].view(np.int32),
          c.logprobs.view(np.int32),
      )
      for i, c in enumerate(exp.completions)
  )


def test_the_update_is_compiled_before_the_rollout(tmp_path, monkeypatch):
  # It takes longest, and the others are lowered meanwhile.
  lowered = []
  for of in (Calibration, Learner, Engine):

    def note(self, *args, **kwargs):
      lowered.append(type(self))

    monkeypatch.setattr(of, 'compile_ahead', note)
  trainer = whole_run.trainer(tmp_path / 'run')
  trainer.ahead = CompileAhead(threads=1)
  with contextlib.closing(trainer), contextlib.closing(trainer.ahead):
    with trainer.spec.make_rewards() as trainer.pool:
      trainer._resume_or_start()
  assert lowered == [Calibration, Learner, Engine]


def test_a_first_evaluation_finds_its_other_precision_compiled(tmp_path):
  settings = {'trainer.val_recipes': ('bf16',)}
  trainer = whole_run.trainer(tmp_path / 'run', settings)
  trainer.ahead = CompileAhead(threads=1)
  programs = {'jit(prepare)', 'jit(prefill)', 'jit(generate)'}
  with contextlib.closing(trainer), contextlib.closing(trainer.ahead):
    with trainer.spec.make_rewards() as trainer.pool:
      with compilations.noted() as compiled:
        state, _ = trainer._resume_or_start()
        concurrent.futures.wait(trainer.ahead._started)
      found = collections.Counter(one.program for one in compiled)
      # The rollout's, and those of the other precision.
      assert [found[name] for name in sorted(programs)] == [2, 2, 1]
      with compilations.noted() as compiled:
        metrics, _ = trainer.collector.evaluate(state)
  assert not programs & {one.program for one in compiled}
  assert any(name.startswith('val-bf16/') for name in metrics)


def test_rollout_and_training_never_differ_in_a_bit(done):
  steps = whole_run.records(done)[1:]
  assert [r['training/mismatch_token_frac'] for r in steps] == [0.0] * 6
  # The run must have moved for that to mean something.
  assert min(r['actor/grad_norm'] for r in steps) > 0.01
  assert min(r['fp8/changed_weight_bytes/mean'] for r in steps) > 0.01
  assert [r['training/updates'] for r in steps] == [1] * 6
  assert [r['training/skipped_updates'] for r in steps] == [0] * 6


def test_the_line_of_a_step_has_every_number_of_such_a_run(done):
  # Less times, and what is divided by them.
  spread = {'max', 'mean', 'min'}
  several = {
      'alarm': set(alarms.NAMED),
      'actor': {'entropy', 'grad_norm', 'lr', 'pg_loss', 'ppo_kl'}
      | {'pg_clipfrac', 'pg_clipfrac_lower', 'update_k3'},
      'critic': {'mixed_group_frac', 'acc/mean'},
      'critic/score': spread,
      'critic/advantages': spread | {'std'},
      'critic/rewards': spread,
      'rewards/digits': {'mean'},
      'fp8/changed_weight_bytes': {'mean', 'min'},
      'perf': {'packing_efficiency', 'total_num_tokens'},
      'prompt_length': spread,
      'response_length': spread | {'clip_ratio'},
      'rollout': {'num_preempted'},
      'rollout_corr': {'k3_kl', 'kl', 'rollout_is_mean'}
      | {'rollout_is_eff_sample_size'},
      'training': {'global_step', 'mismatch_token_frac', 'skipped_updates'}
      | {'token_mult_prob_error', 'updates'}
      | {f'logprob_diff_{sign}_advantage' for sign in ('negative', 'positive')}
      | {
          f'rollout_{x}_diff_{of}'
          for x in ('logprob', 'probs')
          for of in ('max', 'mean')
      },
  } | {
      f'fp8/{operand}': {'saturated_frac/max', 'flushed_frac/max'}
      | {'sqnr_db/min'}
      for operand in ('input', 'kernel', 'output_grad')
  }
  expected = {
      f'{room}/{name}' for room, names in several.items() for name in names
  }
  expected |= {'step', 'fp8_health', 'fp8_changed_weight_bytes'}
  for record in whole_run.records(done)[1:]:
    # Besides what belongs to an evaluation.
    evaluated = {n for n in record if n.startswith(('val-', alarms.SHARED))}
    assert set(record) - evaluated == expected


def test_without_a_kl_term_there_is_no_reference(done):
  assert not (done / 'reference').exists()
  assert not any('actor/kl_loss' in r for r in whole_run.records(done))


def test_each_phase_of_a_step_has_a_time_of_its_own(done):
  phases = {'gen', 'reward', 'adv', 'old_log_prob', 'update_actor'}
  for times in whole_run.times(done)[1:]:
    assert phases <= set(times) and 'ref' not in times
    assert sum(times.values()) <= 2 * times['step']


def test_evaluation_happens_at_the_start_and_every_test_freq_steps(done):
  name = 'val-core/heldout/acc/mean@1'
  records = whole_run.records(done)
  assert [r['step'] for r in records if name in r] == [0, 3, 6]
  assert len(list((done / 'samples').iterdir())) == 3


def test_a_test_freq_of_0_never_evaluates(tmp_path):
  changes = {'trainer.test_freq': 0, 'trainer.total_training_steps': 1}
  whole_run.trainer(tmp_path, changes).train()
  start, step = whole_run.records(tmp_path)
  assert start == {'step': 0, 'training/global_step': 0}
  assert not any(name.startswith('val-') for name in step)
  assert not (tmp_path / 'samples').exists()


def test_an_evaluation_samples_as_its_own_settings_say(monkeypatch):
  run = RunConfig(
      seed=5, temperature=0.7, val_temperature=0.25, val_num_generations=3
  )
  spec = types.SimpleNamespace(
      run=run, val_set=(), tokenizer=None, environment=None
  )
  asked = {}

  def evaluate(*arguments, **how):
    asked.update(how)
    return {}, []

  monkeypatch.setattr(evaluation, 'evaluate', evaluate)
  collector = Collector(spec, None, None, None, lambda: None, Timer())
  collector._evaluate_in(None, None)
  assert (asked['temperature'], asked['num_generations']) == (0.25, 3)
  # The same noise at every step, and none that a rollout has.
  assert asked['base_key'] == rng.key(5, rng.EVALUATION, 0)


def test_every_step_samples_with_noise_of_its_own(monkeypatch, live):
  # `rollout` the function hides the module of that name.
  where = sys.modules[Collector.__module__]
  keys, collector = [], live.trainer.collector
  monkeypatch.setattr(
      where, 'rollout', lambda *_, base_key, **__: keys.append(base_key)
  )
  scores = types.SimpleNamespace(visit=None, add=None)
  for step in (3, 4):
    collector.rollout(step, [], live.state, scores)
  seed = live.trainer.spec.run.seed
  assert keys == [rng.key(seed, rng.ROLLOUT, step) for step in (3, 4)]


def test_each_step_counts_the_sequences_that_waited_in_its_own_rollouts(
    monkeypatch, live
):
  collector, position = live.trainer.collector, live.trainer.sampler.state()
  rollout = collector.rollout

  def counted(*arguments):
    found = rollout(*arguments)
    collector.engine.pages.times_preempted = 3
    return found

  monkeypatch.setattr(collector, 'rollout', counted)
  for step in (4, 5):
    sampled = collector.collect(step, live.state)
    assert sampled.metrics['rollout/num_preempted'] == 3
  live.trainer.sampler.restore(position)


def test_a_rollout_that_cannot_be_written_ends_its_step(live, monkeypatch):
  trainer, position = live.trainer, live.trainer.sampler.state()

  def full(*_):
    raise OSError('no space is left')

  # A thread writes it during the update.
  monkeypatch.setattr(trainer.folder, 'save_rollouts', full)
  with pytest.raises(OSError, match='no space is left'):
    trainer._train_step(4, jax.tree.map(jnp.copy, live.state))
  trainer.sampler.restore(position)


def test_evaluating_moves_nothing(live):
  before = whole_run.digest(live.state)
  live.trainer._evaluate(9, live.state)
  assert whole_run.digest(live.state) == before


def test_the_start_up_bit_test_sees_equal_bits_and_a_moved_weight(
    live, monkeypatch
):
  trainer, state = live.trainer, live.state

  def differing() -> float:
    return preflight.bit_test(
        trainer.spec,
        trainer.collector.engine,
        trainer.learner.logprobs_in_update,
        state,
        trainer.interrupt.check,
    )

  assert differing() == 0.0
  # The engine samples with other weights than those that are scored.
  rollout_of = preflight.short_rollout
  moved = jax.tree.map(jnp.copy, state)
  moved.weights['final_norm']['scale'] *= 1.01
  monkeypatch.setattr(
      preflight,
      'short_rollout',
      lambda spec, engine, _, check: rollout_of(spec, engine, moved, check),
  )
  assert differing() > 0.5


def test_saved_rollouts_replayed_give_the_same_weights(done, live):
  trainer, state = live.trainer, jax.tree.map(jnp.copy, live.state)
  for step in (5, 6):
    exp = replay.load_experience(
        done / 'rollouts' / f'{step:06d}.npz',
        trainer.spec.train_set,
        trainer.spec.algorithm,
    )
    state, learnt = trainer.learner.learn(state, exp)
    assert _same_bits(exp, learnt.train_logprobs)
  saved = whole_run.digest(whole_run.restored(done, 6).state)
  again = whole_run.digest(
      {
          name: getattr(state, name)
          for name in ('trainable', 'frozen', 'fp8_state', 'opt_state')
      }
      | {'opt_step': state.opt_step}
  )
  assert again == saved


def test_recomputed_old_log_probs_are_the_rollouts_and_so_are_the_weights(live):
  state, infos, scored = live.learn(old_logprobs='rollout')
  again, _, scored_again = live.learn(old_logprobs='recompute')
  assert len(infos) == 2  # Two mini-batches of two prompts.
  # Also the second mini-batch's, scored before the first update.
  assert _same_bits(live.exp, scored) and _same_bits(live.exp, scored_again)
  assert whole_run.digest(again) == whole_run.digest(state)


def test_what_is_not_measured_changes_no_weight(live):
  expected, _, all_scored = live.learn()
  state, _, scored = live.learn(measure_mismatch='first')
  assert whole_run.digest(state) == whole_run.digest(expected)
  # Of two mini-batches the first, as its update computes it.
  assert len(scored) == len(all_scored) // 2
  for i, values in scored.items():
    np.testing.assert_array_equal(values, all_scored[i])
  # Recomputed log-probs are there for all.
  _, _, recomputed = live.learn(
      measure_mismatch='first', old_logprobs='recompute'
  )
  assert len(recomputed) == len(all_scored)


def test_fewer_and_longer_rows_change_no_bit_of_a_log_prob(live):
  # `accumulate` compiles once more.
  _, (info,), scored = live.learn(packed_rows=1, mini_batch_size=4)
  assert _same_bits(live.exp, scored)
  # The same gradient but for the order of its sums.
  _, (expected,), _ = live.learn(mini_batch_size=4)
  np.testing.assert_allclose(info.grad_norm, expected.grad_norm, rtol=1e-4)


def test_a_smaller_last_micro_batch_changes_no_bit_of_a_log_prob(live):
  # `accumulate` compiles once more.
  _, expected = live.result()
  _, found = live.result(smaller_micro_batches=1)
  assert found.packing_efficiency > expected.packing_efficiency
  assert _same_bits(live.exp, found.train_logprobs)
  np.testing.assert_allclose(
      found.infos[0].grad_norm, expected.infos[0].grad_norm, rtol=1e-4
  )


def test_a_second_epoch_updates_again_off_policy(live):
  once, infos, _ = live.learn()
  twice, more, scored = live.learn(ppo_epochs=2)
  assert (len(infos), len(more)) == (2, 4)
  assert int(twice.opt_step) == int(once.opt_step) + 2
  kl = [float(info.metrics['actor/ppo_kl'].value()) for info in more]
  # The first mini-batch is on-policy: its ratio is exactly 1.
  assert kl[0] == 0.0 and all(value != 0.0 for value in kl[1:])
  assert _same_bits(live.exp, scored)


def test_one_updates_distance_is_the_same_however_it_comes_about(live):
  # Scored once more after the only update, and with a second epoch's forward.
  _, alone = live.result(mini_batch_size=4)
  _, epochs = live.result(mini_batch_size=4, ppo_epochs=2)
  assert alone.update_k3 == epochs.update_k3 > 0
  # Of the second of two mini-batches, measured before it or by the rollout.
  _, measured = live.result()
  _, trusted = live.result(measure_mismatch='first')
  assert measured.update_k3 == trusted.update_k3 > 0
  assert measured.update_k3 != alone.update_k3
  assert alone.rollout_update_k3 is None


def test_an_updates_distance_is_that_of_the_answers_log_probs(live):
  learner = live.trainer.learner
  sequences = [
      sequence_from_completion(
          completion,
          advantage=0.0,
          loss_weight=0.0,
          mask_truncated=False,
          origin=i,
      )
      for i, completion in enumerate(live.exp.completions)
  ]

  def sampled(state):
    params = PolicyParams(state.weights, state.fp8_state)
    values = learner.logprobs(sequences, params)
    pairs = zip(values, live.exp.completions, strict=True)
    joined = np.concatenate([v[len(c.prompt_tokens) :] for v, c in pairs])
    return joined.astype(np.float64)

  # One update on all 16 answers, which fill a micro-batch.
  after, result = live.result(mini_batch_size=4)
  # The scales of inputs move last, which is no update.
  after = dataclasses.replace(after, fp8_state=live.state.fp8_state)
  x = sampled(live.state) - sampled(after)
  np.testing.assert_allclose(
      result.update_k3, np.mean(np.exp(-x) - 1 + x), rtol=1e-6
  )


@pytest.mark.parametrize('mode', aggregation.MODES)
def test_every_loss_aggregation_updates_on_policy(live, mode):
  state, infos, scored = live.learn(loss_agg_mode=mode)
  assert all(bool(info.applied) for info in infos)
  assert _same_bits(live.exp, scored)
  moved = whole_run.digest(state.trainable)
  assert moved != whole_run.digest(live.state.trainable)
  if mode == 'seq-mean-token-sum-norm':
    # All weights over 12 instead of over the tokens: another gradient.
    assert float(infos[0].grad_norm) != float(live.learn()[1][0].grad_norm)


def test_a_constant_divisor_is_the_longest_answer_that_may_be(
    live, monkeypatch
):
  made, taken = experience.mini_batches, []

  def noted(*arguments, **how):
    taken.extend(made(*arguments, **how))
    return taken

  monkeypatch.setattr(experience, 'mini_batches', noted)
  live.learn(loss_agg_mode='seq-mean-token-sum-norm')
  # Two prompts of four answers each, of at most 12 tokens.
  assert [len(batch) for batch in taken] == [8, 8]
  for sequence in (s for batch in taken for s in batch):
    weight = sequence.loss_mask * np.float32(1 / (8 * 12))
    np.testing.assert_array_equal(sequence.loss_weight, weight)


def test_truncated_completions_can_be_left_out_of_the_loss(live):
  _, infos, _ = live.learn()
  _, masked, scored = live.learn(mask_truncated_completions=True)

  def tokens(updates):
    return sum(float(u.metrics['actor/entropy'].weight) for u in updates)

  kept = sum(
      len(c.tokens) for c in live.exp.completions if c.finish_reason == 'stop'
  )
  assert tokens(infos) == sum(len(c.tokens) for c in live.exp.completions)
  assert tokens(masked) == kept
  # They are compared with the training forward all the same.
  assert _same_bits(live.exp, scored)


def _nan_from(opt_step, config, batch, logprobs_BT, entropy_BT):
  """The policy loss, NaN once `opt_step` updates were applied."""
  loss, metrics = policy_loss(config, batch, logprobs_BT, entropy_BT)
  bad = jnp.max(batch.weight_version) >= opt_step
  return jnp.where(bad, jnp.nan, 1.0) * loss, metrics


def test_updates_that_are_not_finite_are_skipped_counted_and_end_the_run(
    tmp_path,
):
  # Another loss: accumulate compiles once more.
  changes = {'trainer.max_skipped_updates': 3, 'trainer.test_freq': 0}
  for stopped_at in (5, 5):  # The second time resumed from step 4.
    trainer = whole_run.trainer(tmp_path, changes)
    trainer.loss = functools.partial(_nan_from, 2, trainer.spec.loss)
    with pytest.raises(
        RuntimeError,
        match='3 updates in a row were not finite .gradient norm nan.; none'
        ' of them changed the weights',
    ):
      trainer.train()
    steps = whole_run.records(tmp_path)[1:]
    # The step that ends the run has its line, too.
    assert [r['step'] for r in steps] == list(range(1, stopped_at + 1))
    assert [r['training/skipped_updates'] for r in steps] == [0, 0, 1, 1, 1]
    assert [r['training/updates'] for r in steps] == [1, 1, 0, 0, 0]
    assert 'actor/grad_norm' in steps[2]['nonfinite']
  before = whole_run.restored(tmp_path, 2, changes)
  after = whole_run.restored(tmp_path, 4, changes)
  assert after.host_state['skipped_in_row'] == 2
  for name in ('trainable', 'opt_state', 'opt_step'):
    assert whole_run.digest(after.state[name]) == whole_run.digest(
        before.state[name]
    )
  kept = store.load_rollouts(tmp_path / 'rollouts' / '000004.npz')[0]
  assert {int(c.weight_version[0]) for c in kept} == {2}


def test_a_run_without_a_learning_signal_is_saved_and_stopped(tmp_path):
  changes = {
      'trainer.stop_after_idle_steps': 3,
      'trainer.test_freq': 0,
      'trainer.total_training_steps': 7,
      # What random weights write is no sum.
      'reward.functions': ('gsm8k',),
  }
  # A resumed run remembers the steps before it.
  trainer = whole_run.trainer(tmp_path, changes)
  _until(trainer, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
  with pytest.raises(StopRequested):
    trainer.train()
  # No step of save_freq, and stopped once it has as many steps again.
  for last in (3, 6):
    with pytest.raises(RuntimeError, match='3 steps in a row had no learning'):
      whole_run.trainer(tmp_path, changes).train()
    steps = whole_run.records(tmp_path)[1:]
    assert [r['step'] for r in steps] == list(range(1, last + 1))
    assert [r['alarm/no_signal'] for r in steps] == [1] * last
    saved = whole_run.restored(tmp_path, changes=changes)
    assert saved.step == last and saved.host_state['idle_in_row'] == 0
  assert [r['reward/no_answer'] for r in steps] == [16] * 6
  # At the last step there is nothing to stop.
  last = changes | {'trainer.stop_after_idle_steps': 1}
  whole_run.trainer(tmp_path, last).train()
  assert whole_run.records(tmp_path)[-1]['step'] == 7


class _Killed(BaseException):
  pass


def _until(trainer: Trainer, step: int, then) -> None:
  """Calls `then` right after the line of this step."""
  log = trainer.folder.log

  def stop(at, metrics):
    log(at, metrics)
    if at == step:
      then()

  trainer.folder.log = stop


def _saved_accuracies(workdir) -> dict[int, float | None]:
  found = checkpoint_folder.manifests(workdir / 'checkpoints')
  return {step: found[step].metric for step in sorted(found)}


def test_a_rollout_runs_beside_the_copy_of_a_checkpoint_and_no_update_does(
    tmp_path, monkeypatch
):
  trainer = whole_run.trainer(tmp_path, {'trainer.total_training_steps': 3})
  checkpoints, seen = trainer.folder.checkpoints, []
  go = threading.Event()
  monkeypatch.setattr(
      checkpoint_arrays, 'on_host', lambda named: (go.wait(60), named)[1]
  )
  collect, learn = Collector.collect, Learner.learn

  def collected(*args):
    sampled = collect(*args)
    seen.append(('rollout', checkpoints.is_copying))
    go.set()
    return sampled

  def learnt(*args):
    seen.append(('update', checkpoints.is_copying))
    return learn(*args)

  monkeypatch.setattr(Collector, 'collect', collected)
  monkeypatch.setattr(Learner, 'learn', learnt)
  # Step 2 is saved; the rollout of step 3 ends before its copy begins.
  _until(trainer, 2, go.clear)
  go.set()
  trainer.train()
  assert seen[-2:] == [('rollout', True), ('update', False)]
  assert checkpoints.all_steps()[0] == 2


def test_a_checkpoint_has_the_accuracy_of_its_own_step_or_none(tmp_path):
  changes = {
      'trainer.total_training_steps': 4,
      'trainer.test_freq': 2,
      'trainer.keep_latest': 1,
  }
  trainer = whole_run.trainer(tmp_path, changes)
  # Saved at the stop, and not evaluated.
  _until(trainer, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
  with pytest.raises(StopRequested):
    trainer.train()
  name = 'val-core/heldout/acc/mean@1'
  second = whole_run.records(tmp_path)[2][name]
  # The newest and the best.
  assert _saved_accuracies(tmp_path) == {2: second, 3: None}
  whole_run.trainer(tmp_path, changes).train()
  fourth = whole_run.records(tmp_path)[4][name]
  kept = _saved_accuracies(tmp_path)
  assert kept == ({2: second} if second > fourth else {}) | {4: fourth}


def test_the_reference_is_the_start_and_is_there_again_after_a_stop(tmp_path):
  # The KL term is part of accumulate, and score compiles besides.
  changes = {
      'algorithm.kl_loss_coef': 0.1,
      'algorithm.kl_reward_coef': 0.01,
      'trainer.total_training_steps': 3,
      'trainer.test_freq': 0,
      'data.val_files': (),
  }

  def kill():
    raise _Killed

  # Killed with a reference and no checkpoint yet: it must start again.
  trainer = whole_run.trainer(tmp_path, changes)
  _until(trainer, 0, kill)
  with pytest.raises(_Killed):
    trainer.train()
  assert (tmp_path / 'reference' / '0').exists()
  assert not list((tmp_path / 'checkpoints').glob('[0-9]*'))

  trainer = whole_run.trainer(tmp_path, changes)
  _until(trainer, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
  with pytest.raises(StopRequested):
    trainer.train()
  first = whole_run.digest(trainer.learner.reference)

  trainer = whole_run.trainer(tmp_path, changes)
  trainer.train()
  assert whole_run.digest(trainer.learner.reference) == first
  kl = [r.get('actor/kl_loss') for r in whole_run.records(tmp_path)]
  # On-policy and before any update the policy is the reference to the bit.
  assert kl[:2] == [None, 0.0] and kl[2] > 0 and kl[3] > 0
  off = [r.get('critic/kl_penalty/mean') for r in whole_run.records(tmp_path)]
  assert off[:2] == [None, None] and off[2] and off[3]
  assert all(times['ref'] > 0 for times in whole_run.times(tmp_path)[1:])

  shutil.rmtree(tmp_path / 'reference')
  config = (tmp_path / 'config.json').read_bytes()
  with pytest.raises(ValueError, match='holds no reference policy'):
    whole_run.trainer(tmp_path, changes | {'optim.lr': 1.0}).train()
  # Refused, it leaves the run's own behind.
  assert (tmp_path / 'config.json').read_bytes() == config


@pytest.mark.slow
def test_a_bf16_run_with_a_frozen_embedding_and_a_cut_sampler(tmp_path):
  # Every program compiles once more.
  changes = {
      'precision.recipe': 'bf16',
      'model.freeze': ('embed/.*', '.*/attn_norm/.*'),
      'rollout.top_p': 0.9,
      'trainer.mini_batch_size': 2,
      'trainer.total_training_steps': 2,
      'trainer.test_freq': 0,
  }
  trainer = whole_run.trainer(tmp_path, changes)
  frozen = whole_run.digest(trainer.spec.initial_params()['embed'])
  trainer.train()
  steps = whole_run.records(tmp_path)[1:]
  assert [r['training/mismatch_token_frac'] for r in steps] == [0.0, 0.0]
  assert [r['training/updates'] for r in steps] == [2, 2]
  assert not any(name.startswith('fp8') for name in steps[0])
  completions, _ = store.load_rollouts(tmp_path / 'rollouts' / '000001.npz')
  log_mu = np.concatenate([c.log_mu for c in completions])
  logprobs = np.concatenate([c.logprobs for c in completions])
  # Cutting the tail makes what is left more likely: mu >= pi.
  assert (log_mu >= logprobs).all() and (log_mu > logprobs).any()
  state = trainer.state
  assert set(state.frozen) == {'embed', 'layers_0'}
  assert whole_run.digest(state.frozen['embed']) == frozen
  assert 'embed' not in state.trainable


@pytest.mark.slow
def test_seeded_scores_and_lengths_need_no_rewards_and_no_stops(tmp_path):
  # No stop tokens: the rollout's loop compiles once more. And few pages.
  changes = {
      'rollout.kv_cache_tokens': 96,
      'trainer.synthetic': True,
      'trainer.total_training_steps': 1,
      'trainer.save_rollouts': False,
      'data.val_files': (),
  }
  whole_run.trainer(tmp_path, changes).train()
  start, step = whole_run.records(tmp_path)
  assert start == {'step': 0, 'training/global_step': 0}
  assert step['training/mismatch_token_frac'] == 0.0
  assert step['actor/grad_norm'] > 0
  assert step['rollout/num_preempted'] > 0
  # Every answer is cut at its own limit, as it is meant to be.
  assert 'alarm/cut' not in step and 'alarm/no_signal' not in step
  assert step['response_length/min'] >= 6 and step['response_length/max'] <= 12
  assert not (tmp_path / 'rollouts').exists()


def test_answers_that_no_reward_applies_to_are_left_out_of_a_run(tmp_path):
  path = tmp_path / 'rewards.py'
  path.write_text(
      'def some(prompts, completions, answer, **kwargs):\n'
      '  digits = sum(c.isdigit() for c in completions[0])\n'
      '  odd = (digits + int(answer[0].split()[-1])) % 2\n'
      '  return [digits / 12 if odd else None]\n'
  )
  workdir = tmp_path / 'run'
  changes = {
      'reward.functions': (f'{path}:some',),
      'trainer.total_training_steps': 2,
      'trainer.test_freq': 2,
  }
  trainer = whole_run.trainer(workdir, changes)
  trainer.train()
  for step in (1, 2):
    record = whole_run.records(workdir)[step]
    assert 'nonfinite' not in record
    file = workdir / 'rollouts' / f'{step:06}.npz'
    completions, extra = store.load_rollouts(file)
    unscored = np.isnan(extra['score'])
    assert 0 < record['reward/unscored'] == unscored.sum() < len(completions)
    assert not extra['advantage'][unscored].any()
    np.testing.assert_allclose(
        record['critic/rewards/mean'], extra['score'][~unscored].mean()
    )
    again = replay.load_experience(
        file, trainer.spec.train_set, trainer.spec.algorithm
    )
    np.testing.assert_array_equal(
        again.advantages_PG.reshape(-1), extra['advantage']
    )
  samples = (workdir / 'samples' / '000002.jsonl').read_text().splitlines()
  found = [json.loads(line)['accuracy'] for line in samples]
  known = [value for value in found if value is not None]
  assert 0 < len(known) < len(found)
  np.testing.assert_allclose(
      whole_run.records(workdir)[2]['val-core/heldout/acc/mean@1'],
      np.mean(known),
  )
