"""The formulas against what verl computes on the same random inputs.

`verl_goldens.json` holds inputs drawn once with NumPy and what the functions
named below returned for them, in float32 on CPU with torch 2.13, at commit
1dda039 of verl (August 2026): `compute_policy_loss_gspo` (clip 3e-4, 4e-4),
`compute_policy_loss_cispo` (both clip distances 1, so a cap of 2 and no lower
bound), `compute_rollout_correction_weights` (cap 1.5; IcePop 0.5 to 1.5; MIS as
its band from 1e-9), `compute_rollout_rejection_mask` (seq_mean_k1, 0.7 to 1.4,
of mu over pi_old: its ratio is the inverse of ours) and the
`compute_*_outcome_advantage` of three estimators. Losses are per token, before
any aggregation; gradients are those of their masked sum.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.rl import advantages, corrections, losses

_GOLDENS = json.loads(
    pathlib.Path(__file__).with_name('verl_goldens.json').read_text()
)
OUTPUTS = _GOLDENS['outputs']
# float32 of one or two roundings, of numbers up to 4.
_NEAR = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=3e-7)


def _input(name: str) -> np.ndarray:
  return np.asarray(_GOLDENS['inputs'][name], np.float32)


_OLD = _input('old_logprobs')
_MASK = np.float32(np.arange(_OLD.shape[1])[None] < _input('lengths')[:, None])
# One sequence per row.
_IDS = jnp.ones(_OLD.shape, jnp.int32)


def _gspo(log_pi_BT, log_ratio_BT):
  del log_pi_BT
  loss = functools.partial(losses.gspo_loss, clip_low=3e-4, clip_high=4e-4)
  return jax.vmap(loss)(log_ratio_BT, _input('advantages'), _MASK, _IDS)


def _cispo(log_pi_BT, log_ratio_BT):
  loss = functools.partial(losses.cispo_loss, cap=2.0)
  return jax.vmap(loss)(log_pi_BT, log_ratio_BT, _input('advantages'))


@pytest.mark.parametrize(
    ('name', 'loss', 'log_pi'),
    [('gspo', _gspo, 'logprobs_near'), ('cispo', _cispo, 'logprobs_far')],
)
def test_a_loss_and_its_gradient_are_verl_s(name, loss, log_pi):
  def total(log_pi_BT):
    log_ratio_BT = jnp.where(_MASK > 0, log_pi_BT - _OLD, 0.0)
    kept_BT = loss(log_pi_BT, log_ratio_BT).loss_T * _MASK
    return kept_BT.sum(), kept_BT

  slope_BT, loss_BT = jax.grad(total, has_aux=True)(jnp.asarray(_input(log_pi)))
  _NEAR(loss_BT, OUTPUTS[name]['loss'])
  _NEAR(slope_BT, OUTPUTS[name]['grad'])
  # Clipping acts on some tokens and not on all.
  assert 0 < (np.asarray(slope_BT) != 0).sum() <= _MASK.sum()


@pytest.mark.parametrize('name', ['token', 'icepop', 'sequence', 'mis'])
def test_an_importance_weight_is_verl_s(name):
  correction = corrections.make_correction(name, threshold=1.5, low=0.5)
  found = jax.vmap(correction)(_input('log_rho'), _MASK, _IDS)
  _NEAR(found * _MASK, OUTPUTS[name])


def test_the_geometric_rejection_is_verl_s():
  band = corrections.make_rejection('geometric', low=0.7, high=1.4)
  found = jax.vmap(band)(_input('log_rho'), _MASK, _IDS) * _MASK
  np.testing.assert_array_equal(found, OUTPUTS['geometric'])
  assert 0 < found.sum() < _MASK.sum()


@pytest.mark.parametrize(
    'name', ['grpo', 'rloo', 'reinforce_plus_plus_baseline']
)
def test_an_advantage_is_verl_s(name):
  found = advantages.estimate(
      _input('rewards'),
      np.asarray(_GOLDENS['inputs']['response_lengths']),
      adv_estimator=name,
      norm_by_std=True,
  )
  _NEAR(found, OUTPUTS[name])
