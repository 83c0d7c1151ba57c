"""What the guard decides, from numbers written by hand."""

import dataclasses
import json

import pytest

from jetrl_jax.rl.settings import GUARD_MAX_K3, GuardConfig
from jetrl_jax.rl.training import guard
from jetrl_jax.rl.training.guard import Action, GuardState

CONFIG = GuardConfig(
    enable=True, max_mismatch_token_frac=0.0, max_k3=GUARD_MAX_K3
)


def _operand(saturated=0.0, flushed=0.0, sqnr=30.0):
  return {
      'saturated_frac': saturated,
      'flushed_frac': flushed,
      'sqnr_db': sqnr,
  }


def _metrics(mismatch=0.0, k3=0.0, norm=1.0, **dots):
  """A step within all bounds, but for what is given.

  Args:
    mismatch: share of tokens.
    k3: in nats.
    norm: of the gradient.
    **dots: health of a dot's input.
  """
  health = {
      name: {
          'input': dots[name] if name in dots else _operand(),
          'kernel': _operand(sqnr=31.0),
          'output_grad': _operand(flushed=0.1, sqnr=5.0),
      }
      for name in ('down', 'o', 'qkv')
  }
  return {
      'training/mismatch_token_frac': mismatch,
      'training/rollout_logprob_diff_max': norm * mismatch,
      'rollout_corr/k3_kl': k3,
      'actor/grad_norm': norm,
      'fp8_health': health,
  }


GOOD = _metrics()
SATURATED = _metrics(down=_operand(saturated=0.02))
NAN = _metrics(norm=float('nan'))


def _run(
    steps, config=CONFIG, saves=2, has_histories=True, is_mixed=False
) -> tuple[list[guard.Decision], GuardState]:
  """Decides step by step, saving every `saves`; what is due is done."""
  state, decisions = GuardState(), []
  for step, metrics in enumerate(steps, start=1):
    decision = guard.decide(
        config,
        state,
        metrics,
        step=step,
        saved=step % saves == 0,
        has_histories=has_histories,
        is_mixed=is_mixed,
    )
    decisions.append(decision)
    state = decision.state.done() if decision.state.due else decision.state
  return decisions, state


def _actions(steps, **options):
  return [d.state.due and d.state.due.name for d in _run(steps, **options)[0]]


def test_the_first_steps_over_a_bound_only_warn():
  (first, second), _ = _run([SATURATED] * 2)
  assert first.state.due is None and first.metrics() == {'guard/over': 1}
  assert first.sentence() == (
      'guard: fp8 saturated_frac is 0.02, bound 0.01 (down): a warning, 1 of 2'
      ' steps in a row'
  )
  assert second.state.due == Action(name='recalibrate')
  assert second.metrics() == {'guard/over': 1, 'guard/recalibrate': 1}


def test_steps_over_a_bound_must_be_in_a_row():
  assert _actions([SATURATED, GOOD] * 5) == [None] * 10


def test_a_bound_that_is_met_is_not_exceeded():
  at = _metrics(down=_operand(saturated=0.01, flushed=0.9), k3=0.01)
  assert guard.breaches(CONFIG, at) == ()
  assert guard.breaches(CONFIG, GOOD) == ()


def test_what_is_not_finite_exceeds_every_bound():
  nan, dot = float('nan'), _operand(saturated=float('nan'))
  config = dataclasses.replace(CONFIG, max_logprob_diff=1.0)
  ill = _metrics(mismatch=nan, k3=nan, down=dot)
  assert [b.metric for b in guard.breaches(config, ill)] == [
      'training/rollout_logprob_diff_max',
      'training/mismatch_token_frac',
      'rollout_corr/k3_kl',
      'training/rollout_logprob_diff_max',
      'fp8 saturated_frac',
  ]
  (breach,) = guard.breaches(CONFIG, GOOD | {'actor/grad_norm': float('inf')})
  assert str(breach) == 'actor/grad_norm is inf'


def test_steps_within_all_bounds_count_only_in_a_row():
  # Two of them would let the scales be measured again.
  state = GuardState(recalibrated=True, within=1)
  for step, metrics in enumerate((SATURATED, GOOD), start=5):
    state = guard.decide(
        CONFIG,
        state,
        metrics,
        step=step,
        saved=False,
        has_histories=True,
        is_mixed=False,
    ).state
  assert state.recalibrated and state.within == 1


def test_a_k3_without_a_bound_is_never_over():
  over = _metrics(k3=1.0)
  (breach,) = guard.breaches(CONFIG, over)
  assert breach.metric == 'rollout_corr/k3_kl'
  free = dataclasses.replace(CONFIG, max_k3=None)
  assert guard.breaches(free, over) == ()


def test_a_step_that_compared_no_token_is_held_to_the_other_bounds():
  config = dataclasses.replace(CONFIG, max_logprob_diff=0.0)
  none = {name: SATURATED[name] for name in ('actor/grad_norm', 'fp8_health')}
  (breach,) = guard.breaches(config, none)
  assert breach.metric == 'fp8 saturated_frac'


def test_scales_come_first_then_precision_and_last_the_checkpoint():
  # `down` gets better scales, then leaves FP8; what is over then has no dot.
  steps = [GOOD] * 3 + [SATURATED] * 4 + [_metrics(mismatch=0.1)] * 2
  decisions, state = _run(steps)
  found = [d.state.due for d in decisions]
  assert found == (
      [None] * 4
      + [Action(name='recalibrate'), None]
      + [Action(name='high_precision', dots=('down',)), None]
      # Step 2 was saved, and step 3 was good, too.
      + [Action(name='rollback', step=2)]
  )
  assert state.high_precision == ('down',) and state.rollbacks == 1
  assert decisions[-1].metrics() == {
      'guard/over': 1,
      'guard/high_precision_dots': 1,
      'guard/rollback': 1,
      'guard/rollback_to': 2,
  }
  assert decisions[-1].sentence() == (
      'guard: training/mismatch_token_frac is 0.1, bound 0: back to the'
      ' checkpoint of step 2'
  )


def test_scales_are_measured_anew_once_until_the_run_has_been_well():
  once = GuardConfig(enable=True, patience=1, actions=('recalibrate',))
  assert _actions([SATURATED, SATURATED, GOOD, SATURATED], config=once) == [
      'recalibrate',
      None,
      None,
      'recalibrate',
  ]


def test_what_is_done_about_a_dot_does_not_bring_back_the_first_action():
  once = dataclasses.replace(CONFIG, patience=1)
  assert _actions([SATURATED] * 3, config=once) == [
      'recalibrate',
      'high_precision',
      'high_precision',
  ]


def test_scales_that_every_use_measures_are_not_measured_anew():
  flushed = _metrics(o=_operand(flushed=0.92), qkv=_operand(flushed=0.96))
  (_, second), _ = _run([flushed] * 2, has_histories=False)
  # The worst first.
  assert second.state.due == Action(name='high_precision', dots=('qkv', 'o'))


def test_the_tail_of_the_logits_is_no_breach():
  metrics = _metrics()
  head = {'input': _operand(), 'output_grad': _operand(flushed=0.97)}
  metrics['fp8_health'] |= {'lm_head': head}
  assert not guard.breaches(CONFIG, metrics)
  head['input'] = _operand(flushed=0.97)
  (breach,) = guard.breaches(CONFIG, metrics)
  assert breach.dots == ('lm_head',)


def test_what_is_not_finite_is_answered_by_a_rollback_alone():
  steps = [GOOD] * 3 + [NAN] * 2
  assert _actions(steps) == [None] * 4 + ['rollback']
  # Although a dot is over its bound as well.
  both = NAN | {'fp8_health': SATURATED['fp8_health']}
  assert _actions([GOOD] * 3 + [both] * 2) == [None] * 4 + ['rollback']


def test_without_a_good_checkpoint_the_guard_says_that_it_cannot_help():
  decisions, _ = _run([NAN] * 3)
  assert [d.state.due for d in decisions] == [None] * 3
  assert decisions[2].sentence() == (
      'guard: actor/grad_norm is nan; training/rollout_logprob_diff_max is nan:'
      ' no allowed action could help'
  )


def test_a_checkpoint_is_good_once_the_step_after_it_was_good():
  # Step 4 is saved, and what it leaves shows in step 5.
  steps = [GOOD] * 4 + [NAN, NAN]
  assert [d.state.good for d in _run(steps)[0]] == [0, 0, 2, 2, 2, 2]
  assert [d.state.candidate for d in _run(steps)[0]] == [0, 2, 0, 4, 0, 0]
  # Nor is one that was saved over a bound.
  steps = [GOOD] * 3 + [SATURATED] + [GOOD] * 2
  assert [d.state.good for d in _run(steps)[0]] == [0, 0, 2, 2, 2, 2]


def test_the_run_ends_where_another_rollback_would_be_one_too_many():
  config = dataclasses.replace(CONFIG, patience=1, max_rollbacks=2)
  decisions, _ = _run([GOOD] * 3 + [NAN] * 3, config)
  assert [d.exhausted for d in decisions] == [False] * 5 + [True]
  assert (
      decisions[-1]
      .sentence()
      .endswith('the run ends; it was rolled back 2 times')
  )


def test_a_mixed_flow_gives_up_the_rollouts_noisiest_dot_for_its_mismatch():
  apart = _metrics(mismatch=0.9, k3=0.02, o=_operand(sqnr=12.0))
  config = GuardConfig(enable=True, patience=1, max_k3=GUARD_MAX_K3)
  (only,), _ = _run([apart], config, has_histories=False, is_mixed=True)
  assert only.state.due == Action(name='high_precision', dots=('o',))
  # Of a unified flow no rounding is to blame.
  assert _actions([apart], config=config) == [None]
  # Delayed scales are measured anew first: a bad one shows as noise, too.
  assert _actions([apart] * 2, config=config, is_mixed=True) == [
      'recalibrate',
      'high_precision',
  ]


def test_a_rollout_with_dynamic_scales_is_judged_by_its_kernels():
  # As `mixed_flow.measured_operands` has it; training is BF16 and has no dots.
  apart = _metrics(k3=0.02)
  del apart['fp8_health']
  apart['rollout_fp8_health'] = {
      'o': {'kernel': _operand(sqnr=40.0)},
      'qkv': {'kernel': _operand(sqnr=38.0)},
  }
  config = GuardConfig(enable=True, patience=1, max_k3=GUARD_MAX_K3)
  (only,), _ = _run([apart], config, has_histories=False, is_mixed=True)
  assert only.state.due == Action(name='high_precision', dots=('qkv',))
  # Nothing in 8 bits is left, so precision cannot help.
  del apart['rollout_fp8_health']
  steps = [GOOD] * 3 + [apart]
  found = _actions(steps, config=config, has_histories=False, is_mixed=True)
  assert found == [None] * 3 + ['rollback']


def test_actions_that_are_not_allowed_are_not_taken():
  warn = dataclasses.replace(CONFIG, actions=())
  assert _actions([GOOD] * 3 + [SATURATED] * 4, config=warn) == [None] * 7
  back = dataclasses.replace(CONFIG, actions=('rollback',))
  steps = [GOOD] * 3 + [SATURATED] * 2
  assert _actions(steps, config=back) == [None] * 4 + ['rollback']


def test_what_the_guard_remembers_comes_back_from_json():
  decisions, end = _run([GOOD] * 3 + [SATURATED] * 4)
  for state in (GuardState(), end, *(d.state for d in decisions)):
    saved = json.loads(json.dumps(state.to_json()))
    assert saved == state.to_json()
    assert GuardState.of_checkpoint({'guard': saved}) == state
  assert GuardState.of_checkpoint({}) == GuardState()


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'max_flushed_frac': 1.5}, r'max_flushed_frac is 1.5; .* \[0, 1\]'),
        ({'max_k3': float('nan')}, 'max_k3 is nan nats; it must be >= 0'),
        ({'max_logprob_diff': -1.0}, 'max_logprob_diff is -1.0 nats'),
        ({'actions': ('reset',)}, r"\('reset',\); allowed: each at most once"),
        ({'actions': ('rollback',) * 2}, 'allowed: each at most once of'),
        ({'patience': 0}, 'guard.patience is 0; it must be >= 1'),
        ({'max_rollbacks': 0}, 'guard.max_rollbacks is 0; it must be >= 1'),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    GuardConfig(**changes)
