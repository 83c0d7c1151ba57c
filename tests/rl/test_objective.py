"""How loss, correction, rejection and metrics meet in a micro-batch."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.rl import packing
from jetrl_jax.rl.objective import POLICY_LOSSES, LossConfig, policy_loss
from tests.hurry import fast_compile_jit

_METHODS = {
    'ppo with acr': LossConfig(rollout_is='acr', rollout_is_threshold=1.1),
    'ppo with icepop and a band': LossConfig(
        rollout_is='icepop',
        rollout_is_threshold=1.2,
        rollout_rs='geometric',
        rollout_rs_threshold_low=0.9,
        rollout_rs_threshold_high=1.1,
    ),
    'gspo with sequence': LossConfig(policy_loss='gspo', rollout_is='sequence'),
    'gspo with mis': LossConfig(
        policy_loss='gspo', rollout_is='mis', rollout_is_threshold=1.1
    ),
    'gspo with icepop per answer': LossConfig(
        policy_loss='gspo',
        rollout_is='icepop',
        rollout_is_threshold=1.2,
        rollout_is_per_answer=True,
    ),
    'cispo with token': LossConfig(policy_loss='cispo', rollout_is='token'),
    'gpg with icepop': LossConfig(policy_loss='gpg', rollout_is='icepop'),
}


def _sequences() -> list[packing.Sequence]:
  """Nine answers of 1 to 9 tokens after prompts of 1 to 4."""
  rng = np.random.default_rng(0)

  def one(i: int) -> packing.Sequence:
    prompt, response = 1 + i % 4, 1 + i
    length = prompt + response
    mask = np.repeat([0, 1], [prompt, response]).astype(np.float32)

    def noise(scale):
      return (mask * scale * rng.normal(size=length)).astype(np.float32)

    old = -mask * np.abs(noise(2.0))
    return packing.Sequence(
        tokens=rng.integers(0, 9, length).astype(np.int32),
        loss_mask=mask,
        loss_weight=mask / (9 * response),
        advantages=mask * np.float32(rng.normal()),
        log_mu=old + noise(0.2),
        rollout_logprobs=old,
        old_logprobs=old,
        ref_logprobs=0 * mask,
        weight_version=np.zeros(length, np.int32),
        origin=i,
    )

  return [one(i) for i in range(9)]


def _gradient(config, sequences, row_length):
  """Returns (loss, gradient per sequence, metrics) of packed sequences."""
  packed = packing.pack(
      sequences, row_length=row_length, rows_per_micro_batch=1, tile=4
  )
  # log pi is old + noise, the same for a token wherever it is packed.
  noise = {
      s.origin: 0.3 * np.random.default_rng(s.origin).normal(size=len(s.tokens))
      for s in sequences
  }
  loss, slopes, metrics = 0.0, [], {}

  def of(logprobs_BT, batch):
    return policy_loss(config, batch, logprobs_BT, jnp.zeros_like(logprobs_BT))

  slope_of = fast_compile_jit(jax.value_and_grad(of, has_aux=True))

  for n, batch in enumerate(packed.batches):
    logprobs_BT = np.array(batch.old_logprobs)
    for p in packed.placements:
      if p.batch == n:
        place = p.row, slice(p.start, p.start + p.length)
        logprobs_BT[place] += noise[p.origin].astype(np.float32)
    (part, found), slope_BT = slope_of(jnp.asarray(logprobs_BT), batch)
    loss += float(part)
    slopes.append(np.asarray(slope_BT))
    for name, value in found.items():
      metrics[name] = metrics[name] + value if name in metrics else value
  return loss, packing.unpack(slopes, packed), metrics


def test_every_policy_loss_is_among_the_methods():
  assert {m.policy_loss for m in _METHODS.values()} == set(POLICY_LOSSES)


@pytest.mark.parametrize('name', _METHODS)
def test_packing_changes_no_gradient_and_no_share(name):
  config, sequences = _METHODS[name], _sequences()
  whole = _gradient(config, sequences, row_length=96)
  split = _gradient(config, sequences[::-1], row_length=16)
  np.testing.assert_allclose(whole[0], split[0], rtol=1e-5)
  for a, b in zip(whole[1], split[1][::-1], strict=True):
    np.testing.assert_array_equal(a, b)
  assert any(slope.any() for slope in whole[1])
  for key, value in whole[2].items():
    np.testing.assert_allclose(
        float(value.sum), float(split[2][key].sum), rtol=1e-5, err_msg=key
    )
    # Numbers of tokens, or of sequences.
    np.testing.assert_allclose(
        float(value.weight), float(split[2][key].weight), rtol=1e-6
    )


@pytest.mark.parametrize('name', POLICY_LOSSES)
def test_on_policy_all_losses_have_the_same_gradient(name):
  (batch,) = packing.pack(
      _sequences(), row_length=96, rows_per_micro_batch=1, tile=4
  ).batches

  def of(logprobs_BT):
    config = LossConfig(policy_loss=name)
    return policy_loss(config, batch, logprobs_BT, jnp.zeros_like(logprobs_BT))

  slope_BT, _ = fast_compile_jit(jax.grad(of, has_aux=True))(
      jnp.asarray(batch.old_logprobs)
  )
  np.testing.assert_array_equal(slope_BT, -batch.loss_weight * batch.advantages)


def _three_tokens(**fields) -> packing.Sequence:
  """Weights 1/2, 1/4, 1/4; advantages 2, 1, -1; log pi_old -1, -2, -1.5."""

  def of(*values):
    return np.asarray([0, *values], np.float32)

  made = packing.Sequence(
      tokens=np.arange(4, dtype=np.int32),
      loss_mask=of(1, 1, 1),
      loss_weight=of(0.5, 0.25, 0.25),
      advantages=of(2, 1, -1),
      log_mu=of(-1, -2, -1.5),
      rollout_logprobs=of(-1, -2, -1.5),
      old_logprobs=of(-1, -2, -1.5),
      ref_logprobs=of(0, 0, 0),
      weight_version=np.zeros(4, np.int32),
      origin=0,
  )
  return dataclasses.replace(made, **fields)


# Ratios pi / pi_old 1, 1.5 and 0.5.
_LOG_PI = jnp.asarray(
    [[jnp.nan, -1.0, -2 + math.log(1.5), -1.5 + math.log(0.5)]]
)
_OLD = np.asarray([0, -1, -2, -1.5], np.float32)


def _loss(config, log_pi=_LOG_PI, **fields):
  batch = packing.pack(
      [_three_tokens(**fields)],
      row_length=4,
      rows_per_micro_batch=1,
      tile=4,
  ).batches[0]
  return policy_loss(config, batch, log_pi, jnp.ones((1, 4)))


def _mu(*rho: float) -> np.ndarray:
  """Makes log mu such that pi_old / mu is rho."""
  return _OLD - np.log(np.asarray([1, *rho], np.float32))


def test_gspo_takes_one_ratio_for_the_answer():
  # s = (1 * 1.5 * 0.5)^(1/3) = 0.9086 for all: -s (1 + 0.25 - 0.25).
  loss, _ = _loss(
      LossConfig(policy_loss='gspo', clip_ratio_low=0.2, clip_ratio_high=0.2)
  )
  np.testing.assert_allclose(loss, -(0.75 ** (1 / 3)), rtol=1e-6)
  # s = 1.5: the tokens of positive advantage are held at 1.3, the third is not.
  config = LossConfig(
      policy_loss='gspo', clip_ratio_low=0.1, clip_ratio_high=0.3
  )
  loss, _ = _loss(config, log_pi=jnp.asarray(_OLD[None]) + math.log(1.5))
  np.testing.assert_allclose(loss, -1.3 * 1.25 + 1.5 * 0.25, rtol=1e-6)


@pytest.mark.parametrize('name', ['token', 'icepop', 'sequence', 'mis'])
def test_gspo_with_a_weight_per_answer_is_trls_sequence_level_loss(name):
  sequences = _sequences()
  clip = {'clip_ratio_low': 0.1, 'clip_ratio_high': 0.1}
  config = LossConfig(
      policy_loss='gspo',
      rollout_is=name,
      rollout_is_threshold=1.1,
      rollout_is_per_answer=True,
      **clip,
  )

  @fast_compile_jit
  @jax.value_and_grad
  def trl(log_pi_T, old_T, mu_T, mask_T, advantage):
    """One answer's part; GRPOTrainer._compute_loss, loss_type='grpo'."""
    log_rho_T = mask_T * (old_T - mu_T)
    if name in ('sequence', 'mis'):
      log_rho_T = jnp.sum(log_rho_T)
    rho = jnp.exp(log_rho_T)
    weight = jnp.minimum(rho, 1.1)
    if name in ('icepop', 'mis'):
      low = 0.5 if name == 'icepop' else 0.0
      weight = jnp.where((rho < low) | (rho > 1.1), 0.0, rho)
    log_ratio_T = mask_T * (log_pi_T - old_T)
    ratio = jnp.exp(jnp.sum(log_ratio_T) / jnp.sum(mask_T))
    held = jnp.clip(ratio, 0.9, 1.1)
    loss = -jnp.minimum(ratio * advantage, held * advantage) * weight
    return jnp.sum(loss * mask_T) / jnp.sum(mask_T) / len(sequences)

  loss, slopes, _ = _gradient(config, sequences, row_length=96)
  expected, apart = 0.0, 0.0
  as_verl = dataclasses.replace(config, rollout_is_per_answer=False)
  others = _gradient(as_verl, sequences, row_length=96)[1]
  for sequence, slope_T, other_T in zip(sequences, slopes, others, strict=True):
    noise = np.random.default_rng(sequence.origin).normal(size=len(slope_T))
    old_T = sequence.old_logprobs
    # One length, so that it is compiled once.
    part, slope = trl(
        *(
            np.pad(x, (0, 16 - len(x))).astype(np.float32)
            for x in (
                old_T + 0.3 * noise,
                old_T,
                sequence.log_mu,
                sequence.loss_mask,
            )
        ),
        sequence.advantages[-1],
    )
    slope = np.asarray(slope)[: len(slope_T)]
    expected += float(part)
    np.testing.assert_allclose(slope_T, slope, rtol=1e-4, atol=1e-8)
    apart = max(apart, float(np.abs(other_T - slope).max()))
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  # A weight per token moves the gradient, one per answer does not.
  assert (apart > 1e-3) == (name in ('token', 'icepop'))


def test_cispo_weighs_the_log_prob():
  # Weights 1, 1.2 (the cap) and 0.5: -(0.5 * 1 * 2 * -1), and so on.
  loss, metrics = _loss(LossConfig(policy_loss='cispo', cispo_cap=1.2))
  second, third = -2 + math.log(1.5), -1.5 + math.log(0.5)
  expected = 1.0 - 0.25 * 1.2 * second + 0.25 * 0.5 * third
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  assert metrics['actor/pg_clipfrac'].value() == pytest.approx(1 / 3)


def test_gpg_does_not_read_the_ratio():
  # -A log pi of the three tokens, weighed by 0.5, 0.25 and 0.25.
  loss, metrics = _loss(LossConfig(policy_loss='gpg'))
  second, third = -2 + math.log(1.5), -1.5 + math.log(0.5)
  np.testing.assert_allclose(loss, 1.0 - 0.25 * (second - third), rtol=1e-6)
  assert metrics['actor/pg_clipfrac'].value() == 0


def test_acr_lets_a_token_keep_the_gradient_that_tis_clips():
  # The second token: r = 1.5, A = 1, rho = 4, C = 2. TIS clips it at 1.2 and
  # weighs by 2; ACR's bound is 1.2 * 4 / 2 = 2.4, so it is not clipped.
  rest = -1.0 + 0.2  # First and third token: rho 1, see test_objective_by_hand.
  for name, second, clipped in (('token', 1.2, 2), ('acr', 1.5, 1)):
    config = LossConfig(rollout_is=name, rollout_is_threshold=2.0)
    loss, metrics = _loss(config, log_mu=_mu(1, 4, 1))
    np.testing.assert_allclose(loss, rest - 0.25 * 2 * second, rtol=1e-6)
    found = metrics['actor/pg_clipfrac'].value()
    assert found == pytest.approx(clipped / 3)
    applied = metrics['rollout_corr/rollout_is_applied_mean'].value()
    assert applied == pytest.approx(4 / 3)
    assert 'rollout_corr/rollout_rs_masked_fraction' not in metrics


def test_what_is_dropped_is_counted_by_token_and_by_answer():
  config = LossConfig(rollout_is='icepop', rollout_is_threshold=5.0)
  loss, metrics = _loss(config, log_mu=_mu(1, 8, 2))
  # The second token is out; the others weigh 1 and 2.
  np.testing.assert_allclose(loss, -1.0 + 2 * 0.2, rtol=1e-6)
  dropped = 'rollout_corr/rollout_rs_masked_fraction'
  assert metrics[dropped].value() == pytest.approx(1 / 3)
  assert metrics['rollout_corr/rollout_rs_seq_masked_fraction'].value() == 1.0
  # The geometric mean of 1, 1, 1.002 is within 0.1% of 1; of 1, 1, 1.01 not.
  config = LossConfig(rollout_rs='geometric')
  loss, metrics = _loss(config, log_mu=_mu(1, 1, 1.002))
  np.testing.assert_allclose(loss, -1.1, rtol=1e-6)
  assert metrics[dropped].value() == 0.0
  loss, metrics = _loss(config, log_mu=_mu(1, 1, 1.01))
  assert loss == 0.0 and metrics[dropped].value() == 1.0


def test_an_answer_that_mis_drops_counts_once_whatever_its_length():
  # Of three tokens, whose product is 8, and of one token, which stays.
  long = _three_tokens(log_mu=_mu(1, 8, 1))
  fields = dataclasses.fields(packing.Sequence)
  arrays = [field.name for field in fields if field.name != 'origin']
  short = dataclasses.replace(
      _three_tokens(), **{x: getattr(_three_tokens(), x)[:2] for x in arrays}
  )
  batch = packing.pack(
      [long, short], row_length=8, rows_per_micro_batch=1, tile=4
  ).batches[0]
  config = LossConfig(rollout_is='mis')
  log_pi = jnp.asarray(batch.old_logprobs)
  _, metrics = policy_loss(config, batch, log_pi, jnp.zeros_like(log_pi))
  prefix = 'rollout_corr/rollout_rs'
  assert metrics[f'{prefix}_masked_fraction'].value() == 3 / 4
  assert metrics[f'{prefix}_seq_masked_fraction'].value() == 1 / 2


def test_a_rejection_and_a_weight_are_multiplied():
  # rho is 1, 4, 1, its geometric mean 1.59, and the weights 1, 2, 1.
  config = LossConfig(
      rollout_is='token', rollout_rs='geometric', rollout_rs_threshold_high=1.6
  )
  loss, metrics = _loss(config, log_mu=_mu(1, 4, 1))
  np.testing.assert_allclose(loss, -1.0 - 0.25 * 2 * 1.2 + 0.2, rtol=1e-6)
  applied = metrics['rollout_corr/rollout_is_applied_mean']
  assert applied.value() == pytest.approx(4 / 3)
  config = dataclasses.replace(config, rollout_rs_threshold_high=1.5)
  loss, metrics = _loss(config, log_mu=_mu(1, 4, 1))
  assert loss == 0.0
  assert metrics['rollout_corr/rollout_is_applied_mean'].value() == 0.0


def test_without_a_correction_log_mu_is_not_read():
  loss, metrics = _loss(LossConfig(), log_mu=np.full(4, np.nan, np.float32))
  np.testing.assert_allclose(loss, -1.1, rtol=1e-6)
  assert not any(name.startswith('rollout_corr') for name in metrics)


def test_what_is_masked_gives_no_gradient_whatever_it_holds():
  config = LossConfig(kl_loss_coef=0.1, entropy_coeff=0.1)
  slopes_BT = jax.grad(lambda x: _loss(config, log_pi=x)[0])(_LOG_PI)
  assert slopes_BT[0, 0] == 0 and slopes_BT[0, 1:].all()


def test_what_is_left_open_takes_the_method_s_own_numbers():
  clip = {
      name: LossConfig(policy_loss=name).clip_range for name in ('ppo', 'gspo')
  }
  assert clip == {'ppo': (0.2, 0.2), 'gspo': (3e-4, 4e-4)}
  caps = {'token': 2.0, 'sequence': 2.0, 'acr': 2.0, 'mis': 3.0, 'icepop': 5.0}
  assert caps == {name: LossConfig(rollout_is=name).rho_cap for name in caps}


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'policy_loss': 'dpo'}, "'dpo'; allowed are ppo, gspo, cispo, gpg"),
        ({'cispo_cap': 0.5}, r'cispo_cap is 0\.5; it bounds the ratio itself'),
        (
            {'policy_loss': 'gspo', 'rollout_is': 'acr'},
            'ACR widens the upper clip bound of each token, which only',
        ),
        (
            {'policy_loss': 'cispo', 'rollout_is': 'acr'},
            "use rollout_is='token'",
        ),
        (
            {'rollout_is': 'token', 'rollout_is_per_answer': True},
            "one weight per answer is for policy_loss='gspo'",
        ),
        ({'rollout_rs': 'k3'}, "'k3'; allowed are 'none' and 'geometric'"),
    ],
)
def test_objectives_that_make_no_sense_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    LossConfig(**changes)
