"""Corrections: by hand on three tokens, and what they have in common.

The expected weights of the random tokens were compared once with
`compute_rollout_correction_weights` and `compute_rollout_rejection_mask` of
verl (August 2026) on the same inputs; they are written out here as formulas.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_jax.rl import corrections

_NAMES = tuple(corrections.DEFAULT_THRESHOLD)
# Two answers of three and two tokens; the first token of each is its prompt.
IDS = jnp.array([1, 1, 1, 1, 0, 2, 2, 2])
MASK = jnp.array([0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0])


def _make(name, threshold=2.0, low=0.5):
  return corrections.make_correction(name, threshold=threshold, low=low)


def _on(correction, rho) -> np.ndarray:
  """Weights of the five response tokens with these ratios."""
  log_rho_T = np.full(8, np.nan, np.float32)
  log_rho_T[[1, 2, 3, 6, 7]] = np.log(rho)
  weight_T = correction(jnp.asarray(log_rho_T), MASK, IDS)
  return np.asarray(weight_T)[[1, 2, 3, 6, 7]]


# Compiled once, with the cap as an argument, for the many calls below.
_TIS = jax.jit(corrections.token_tis)
_SEQUENCE = jax.jit(corrections.sequence_tis)
_MIS = jax.jit(corrections.mis)
_ICEPOP = jax.jit(corrections.icepop)
_WIDENING = jax.jit(corrections.acr_widening)

RHO = [1.0, 4.0, 0.25, 2.5, 1.2]


@pytest.mark.parametrize('name', ['token', 'acr'])
def test_the_token_weight_is_the_ratio_up_to_the_cap(name):
  np.testing.assert_allclose(
      _on(_make(name), RHO), [1.0, 2.0, 0.25, 2.0, 1.2], rtol=1e-6
  )


def test_icepop_drops_the_tokens_outside_its_band():
  # [0.5, 2]: 4, 0.25 and 2.5 are out; what stays keeps its ratio.
  np.testing.assert_allclose(
      _on(_make('icepop'), RHO), [1.0, 0.0, 0.0, 0.0, 1.2], rtol=1e-6
  )


def test_the_sequence_weight_is_the_product_up_to_the_cap():
  # 1 * 4 / 4 = 1, and 2.5 * 1.2 = 3, capped at 2.
  np.testing.assert_allclose(
      _on(_make('sequence'), RHO), [1.0, 1.0, 1.0, 2.0, 2.0], rtol=1e-6
  )


def test_mis_drops_the_answers_above_the_cap():
  np.testing.assert_allclose(
      _on(_make('mis'), RHO), [1.0, 1.0, 1.0, 0.0, 0.0], rtol=1e-6
  )
  # At 3.1 the second one, whose product is 3, stays with its weight.
  np.testing.assert_allclose(
      _on(_make('mis', 3.1), RHO), [1.0, 1.0, 1.0, 3.0, 3.0], rtol=1e-6
  )


def test_the_geometric_band_keeps_or_drops_whole_answers():
  # Geometric means: (1 * 4 / 4)^(1/3) = 1 and 3^(1/2) = 1.732.
  band = functools.partial(corrections.make_rejection, 'geometric')
  narrow = band(low=0.999, high=1.001)
  np.testing.assert_array_equal(_on(narrow, RHO), [1, 1, 1, 0, 0])
  np.testing.assert_array_equal(
      _on(band(low=0.5, high=1.74), RHO), [1, 1, 1, 1, 1]
  )
  # A long answer is not dropped for being long: 1.0005^3 > 1.001.
  np.testing.assert_array_equal(_on(narrow, [1.0005] * 5), np.ones(5))


def test_acr_raises_the_upper_bound_where_the_weight_is_capped():
  # max(1, rho / 2) for rho 1, 4, 0.25.
  found = corrections.acr_widening(
      jnp.log(jnp.array([1.0, 4.0, 0.25])), threshold=2.0
  )
  np.testing.assert_allclose(found, [1.0, 2.0, 1.0], rtol=1e-6)


@pytest.mark.parametrize('name', _NAMES)
def test_equal_bits_give_a_weight_of_exactly_one(name):
  np.testing.assert_array_equal(_on(_make(name), [1.0] * 5), np.ones(5))
  # A cap of exactly 1 contains the ratio of equal bits.
  np.testing.assert_array_equal(_on(_make(name, 1.0), [1.0] * 5), np.ones(5))


def test_the_narrowest_bands_keep_what_is_on_policy():
  narrowest = (
      corrections.make_rejection('geometric', low=1.0, high=1.0),
      functools.partial(corrections.icepop, low=1.0, threshold=1.0),
  )
  for correction in narrowest:
    np.testing.assert_array_equal(_on(correction, [1.0] * 5), np.ones(5))
    off = _on(correction, [1.001] * 3 + [0.999] * 2)
    np.testing.assert_array_equal(off, np.zeros(5))


@pytest.mark.parametrize('name', _NAMES)
def test_no_gradient_flows_through_the_weight(name):
  log_rho_T = jnp.linspace(-0.5, 0.5, 8)
  slope_T = jax.grad(lambda x: _make(name)(x, MASK, IDS).sum())(log_rho_T)
  np.testing.assert_array_equal(slope_T, np.zeros(8))
  slope_T = jax.grad(
      lambda x: corrections.acr_widening(x, threshold=0.5).sum()
  )(log_rho_T)
  np.testing.assert_array_equal(slope_T, np.zeros(8))


_log_ratios = st.lists(st.floats(-2, 2, width=32), min_size=5, max_size=5).map(
    lambda x: np.asarray(x, np.float32)
)


@settings(max_examples=30, deadline=None)
@given(_log_ratios, st.floats(1.0, 4.0))
def test_where_rho_is_below_the_cap_all_token_corrections_are_tis(logs, cap):
  rho = np.exp(logs)
  below = (rho <= cap * (1 - 1e-6)) & (rho >= 1e-6)
  tis = _on(functools.partial(_TIS, threshold=cap), rho)
  ice = _on(functools.partial(_ICEPOP, low=0.0, threshold=cap), rho)
  wide = np.asarray(_WIDENING(jnp.asarray(logs), threshold=cap))
  np.testing.assert_array_equal(tis[below], ice[below])
  np.testing.assert_array_equal(wide[below], 1.0)
  # Above it IcePop gives nothing, and the widened bound undoes the cap.
  above = rho > cap * (1 + 1e-6)
  assert not ice[above].any()
  np.testing.assert_allclose(tis[above] * wide[above], rho[above], rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(_log_ratios, st.floats(1.0, 4.0))
def test_mis_is_sequence_tis_for_the_answers_it_keeps(logs, cap):
  mis = _on(functools.partial(_MIS, threshold=cap), np.exp(logs))
  tis = _on(functools.partial(_SEQUENCE, threshold=cap), np.exp(logs))
  np.testing.assert_array_equal(mis[mis > 0], tis[mis > 0])
  np.testing.assert_allclose(tis[mis == 0], cap, rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.floats(-2, 2, width=32), st.floats(1.0, 4.0))
def test_for_one_token_the_sequence_weight_is_the_token_weight(log, cap):
  one = (jnp.array([0.0, log]), jnp.array([0.0, 1.0]), jnp.array([1, 1]))
  token = _TIS(*one, threshold=cap)[1]
  assert _SEQUENCE(*one, threshold=cap)[1] == token


def test_an_answer_s_weight_does_not_depend_on_its_neighbours():
  log_rho_T = jnp.asarray(
      np.random.default_rng(0).normal(size=8) * 0.3, jnp.float32
  )
  second = (log_rho_T[5:], MASK[5:], jnp.array([1, 1, 1]))
  band = corrections.make_rejection('geometric', low=0.9, high=1.1)
  for correction in (_make('sequence'), _make('mis'), band):
    np.testing.assert_array_equal(
        correction(log_rho_T, MASK, IDS)[5:], correction(*second)
    )


def test_random_tokens_agree_with_the_formulas():
  rng = np.random.default_rng(1)
  logs = rng.normal(size=5).astype(np.float32) * 0.5
  rho = np.exp(logs.astype(np.float64))
  both = np.repeat([rho[:3].prod(), rho[3:].prod()], [3, 2])
  expected = {
      'none': np.ones(5),
      'token': np.minimum(rho, 1.5),
      'acr': np.minimum(rho, 1.5),
      'icepop': np.where((rho >= 0.5) & (rho <= 1.5), rho, 0),
      'sequence': np.minimum(both, 1.5),
      'mis': np.where(both <= 1.5, both, 0),
  }
  for name, weights in expected.items():
    found = _on(_make(name, 1.5), np.exp(logs))
    np.testing.assert_allclose(found, weights, rtol=2e-6, err_msg=name)


def test_a_token_that_mu_could_hardly_have_drawn_keeps_a_finite_weight():
  log_rho_T = jnp.array([1e4, -1e4])
  ids_T = jnp.array([1, 2])
  for name in ('token', 'sequence'):
    found = _make(name, math.inf)(log_rho_T, jnp.ones(2), ids_T)
    np.testing.assert_allclose(found, [np.exp(20.0), np.exp(-20.0)], rtol=1e-6)


def test_an_unknown_correction_is_answered_with_the_known_ones():
  with pytest.raises(ValueError, match="'tokens'; allowed are 'none', 'token'"):
    _make('tokens')
  with pytest.raises(ValueError, match="'geo'; allowed are 'none' and 'geom"):
    corrections.make_rejection('geo', low=0.9, high=1.1)


@pytest.mark.parametrize('threshold', [0.0, -1.0, float('nan')])
@pytest.mark.parametrize('name', [n for n in _NAMES if n != 'none'])
def test_a_cap_that_is_not_positive_is_refused(name, threshold):
  with pytest.raises(ValueError, match='rollout_is_threshold.*above 0'):
    _make(name, threshold)


@pytest.mark.parametrize('low', [-0.1, 2.0, float('nan')])
def test_an_icepop_band_without_width_is_refused(low):
  with pytest.raises(ValueError, match='rollout_is_threshold_low is .*usual'):
    _make('icepop', 2.0, low)


@pytest.mark.parametrize(
    'band', [(0.0, 1.1), (1.01, 1.1), (0.9, 0.99), (0.9, math.inf)]
)
def test_a_rejection_band_without_one_is_refused(band):
  with pytest.raises(ValueError, match='the band must be finite, above 0 and'):
    corrections.make_rejection('geometric', low=band[0], high=band[1])


def test_a_new_correction_without_a_case_is_not_none(monkeypatch):
  monkeypatch.setitem(corrections.DEFAULT_THRESHOLD, 'mine', 2.0)
  with pytest.raises(NotImplementedError, match="'mine' has no case here"):
    corrections.make_correction('mine', threshold=2.0, low=0.5)
