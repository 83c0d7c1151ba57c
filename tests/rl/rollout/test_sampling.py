import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jetrl_jax.kernels.sample_token import draw, gumbel_argmax
from jetrl_jax.rl.rollout import sampling

_VOCABULARY = 7
# 99.9% quantile of chi-square with 4 degrees of freedom.
_CHI2_999 = {2: 13.82, 4: 18.47}

_OFF = {'top_k': 0, 'top_p': 1.0, 'min_p': 0.0}


@functools.cache
def _jitted_mask(top_k, top_p, min_p):
  return jax.jit(
      functools.partial(
          sampling.truncation_mask, top_k=top_k, top_p=top_p, min_p=min_p
      )
  )


def _mask(logits, **settings_):
  mask = _jitted_mask(**(_OFF | settings_))(jnp.asarray(logits, jnp.float32))
  return None if mask is None else np.asarray(mask).tolist()


def _reference(logits, top_k, top_p, min_p):
  """Tries the prefixes of the sorted tokens, in float64.

  Also returns how near a decision was to its border, where float32 may decide
  otherwise.
  """
  weight = np.exp(np.asarray(logits, np.float64) - max(logits))
  order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
  if top_k > 0:
    order = order[:top_k]
  total = sum(weight[v] for v in order)
  margin = 1.0
  if top_p < 1.0:
    for n in range(1, len(order) + 1):
      mass = sum(weight[v] for v in order[:n]) / total
      margin = min(margin, abs(mass - top_p))
      if mass >= top_p:
        order = order[:n]
        break
  if min_p > 0.0:
    margin = min([margin, *(abs(weight[v] - min_p) for v in order)])
    order = [v for v in order if weight[v] >= min_p]
  return [v in order for v in range(len(logits))], margin


# Few distinct values, so that ties are common.
_LOGITS = st.lists(
    st.integers(-6, 6).map(lambda i: i / 2),
    min_size=_VOCABULARY,
    max_size=_VOCABULARY,
)


# top_k, top_p, min_p; each combination is compiled once.
_SETTINGS = [
    (1, 1.0, 0.0),
    (3, 1.0, 0.0),
    (0, 0.05, 0.0),
    (0, 0.61, 0.0),
    (0, 0.9, 0.0),
    (0, 1.0, 0.21),
    (50, 0.9, 0.0),
    (3, 0.61, 0.0),
    (5, 0.9, 0.21),
]


@settings(max_examples=300, deadline=None)
@given(_LOGITS, st.sampled_from(_SETTINGS))
def test_the_set_kept_is_that_of_a_search_over_prefixes(logits, setting):
  k, p, m = setting
  expected, margin = _reference(logits, k, p, m)
  assume(margin > 1e-6)
  assert _mask(logits, top_k=k, top_p=p, min_p=m) == expected


def test_top_k_keeps_k_tokens_and_of_ties_the_lower_ids():
  assert _mask([1.0, 2.0, 1.0, 1.0], top_k=2) == [True, True, False, False]
  assert _mask([0.0, -0.0, 0.0, -1.0], top_k=2) == [True, True, False, False]
  assert _mask([-0.0, 0.0, -0.0, 0.0], top_k=1) == [True, False, False, False]
  assert _mask([0.0, 1.0, 0.5, -1.0], top_k=2) == [False, True, True, False]


def test_top_k_alone_keeps_what_is_too_small_to_add_to_the_mass():
  # In float32 1 + exp(-100) is 1, the whole mass.
  found = _mask([0.0, -200.0, -100.0, -300.0], top_k=3)
  assert found == [True, True, True, False]


def test_top_p_keeps_the_smallest_set_that_reaches_p():
  # Probabilities 1/2, 1/4, 1/8, 1/8: sums 0.5, 0.75, 0.875, 1.
  logits = np.log([4.0, 8.0, 2.0, 2.0])
  assert _mask(logits, top_p=0.45) == [False, True, False, False]
  assert _mask(logits, top_p=0.6) == [True, True, False, False]
  assert _mask(logits, top_p=0.8) == [True, True, True, False]
  assert _mask(logits, top_p=0.9) == [True, True, True, True]


def test_a_set_whose_mass_is_exactly_p_reaches_it():
  # Four equal logits: exp(0) = 1, so masses 1, 2, 3, 4 of 4, without rounding.
  assert _mask([5.0] * 4, top_p=0.5) == [True, True, False, False]


@pytest.mark.parametrize('top_p', [0.1, 0.45, 0.6, 0.8, 0.9])
def test_a_top_p_that_is_not_static_keeps_the_same_tokens(top_p):
  z_V = jnp.asarray([[0.3, 2.0, -1.0, 0.3, 1.0]], jnp.float32)
  found = jax.vmap(sampling.top_p_mask)(z_V, jnp.asarray([top_p], jnp.float32))
  assert found[0].tolist() == _mask(z_V[0].tolist(), top_p=top_p)


def test_top_p_runs_over_what_top_k_left():
  # Of 4, 3, 2, 1 the top two have masses 4/7 and 3/7 after top-k, and 0.4 and
  # 0.3 before: 0.5 is reached by one token, or would be by two.
  logits = np.log([1.0, 2.0, 3.0, 4.0])
  assert _mask(logits, top_k=2, top_p=0.5) == [False, False, False, True]
  assert _mask(logits, top_p=0.5) == [False, False, True, True]


def test_min_p_is_a_share_of_the_largest_probability():
  logits = np.log([8.0, 4.1, 3.9, 1.0])
  assert _mask(logits, min_p=0.5) == [True, True, False, False]
  assert _mask([1.0, 1.0, 0.5], min_p=1.0) == [True, True, False]


@pytest.mark.parametrize(
    'harsh', [{'top_k': 1}, {'top_p': 1e-9}, {'min_p': 1.0}]
)
def test_the_most_probable_token_always_stays(harsh):
  assert _mask([0.5, 3.0, -1.0], **harsh) == [False, True, False]
  equal = _mask([-1e30, -1e30, -1e30], **harsh)
  assert equal is not None and equal[0]


def test_settings_that_are_off_give_no_mask():
  for top_k in (0, -1, 3, 8):
    assert _mask([1.0, 2.0, 3.0], top_k=top_k) is None


def test_only_top_k_and_top_p_sort():
  def primitives(**settings_):
    jaxpr = jax.make_jaxpr(
        functools.partial(sampling.truncation_mask, **(_OFF | settings_))
    )(jnp.zeros(8))
    return {str(e.primitive) for e in jaxpr.eqns}

  assert 'top_k' in primitives(top_p=0.9)
  assert not {'top_k', 'sort'} & primitives(min_p=0.1)
  assert not primitives()


@pytest.mark.parametrize(
    'setting, message',
    [
        ({'top_k': -2}, 'top_k is -2'),
        ({'top_p': 0.0}, r'top_p is 0.0; it must be in \(0, 1\]'),
        ({'top_p': 1.1}, 'top_p is 1.1'),
        ({'min_p': -0.1}, 'min_p is -0.1'),
        ({'min_p': 2.0}, 'min_p is 2.0'),
    ],
)
def test_a_setting_outside_its_range_is_named(setting, message):
  with pytest.raises(ValueError, match=message):
    sampling.check_settings(**(_OFF | setting))


def _draw(z_V, mask_V, count, greedy=False):
  keys = jax.random.split(jax.random.key(7), count)
  draw = jax.vmap(lambda key: gumbel_argmax(z_V, mask_V, key, greedy=greedy))
  return np.asarray(draw(keys))


@pytest.mark.parametrize(
    'kept', [None, [True, False, True, False, True]], ids=['all', 'masked']
)
def test_drawn_frequencies_pass_a_chi_square_test(kept):
  z_V = jnp.array([0.0, 1.0, -1.0, 2.0, 0.5])
  mask_V = None if kept is None else jnp.array(kept)
  kept = np.ones(5, bool) if kept is None else np.array(kept)
  count = 20000
  seen = np.bincount(_draw(z_V, mask_V, count), minlength=5)
  weight = np.exp(np.asarray(z_V, np.float64)) * kept
  expected = count * weight / weight.sum()
  assert not seen[~kept].any()
  chi2 = ((seen - expected)[kept] ** 2 / expected[kept]).sum()
  assert chi2 < _CHI2_999[kept.sum() - 1]


def test_a_greedy_row_takes_the_first_most_probable_token():
  z_V = jnp.array([0.0, 1.0, 1.0, -2.0])
  np.testing.assert_array_equal(_draw(z_V, None, 50, greedy=True), np.ones(50))
  assert set(_draw(z_V, None, 50).tolist()) == {0, 1, 2}


def test_greedy_rows_of_a_batch_take_no_noise():
  logits_BV = jnp.tile(jnp.array([0.0, 0.5, 0.25]), (32, 1))
  greedy_B = jnp.arange(32) % 2 == 0
  found, _ = draw(
      logits_BV,
      jnp.ones(32),
      None,
      jax.random.split(jax.random.key(0), 32),
      greedy_B=greedy_B,
  )
  assert set(found[greedy_B].tolist()) == {1}
  assert set(found[~greedy_B].tolist()) == {0, 1, 2}


def test_a_row_draws_the_same_token_in_any_batch():
  rng = np.random.default_rng(0)
  z_BV = jnp.asarray(3.0 * rng.normal(size=(6, 33)), jnp.float32)
  key_B = jax.random.split(jax.random.key(3), 6)

  def draw(z_V, key):
    mask_V = sampling.truncation_mask(z_V, top_k=20, top_p=0.9, min_p=0.01)
    token = gumbel_argmax(z_V, mask_V, key)
    assert mask_V is not None
    return token, sampling.log_mu(z_V, mask_V, token)

  draw_all, single = jax.jit(jax.vmap(draw)), jax.jit(draw)
  batch = draw_all(z_BV, key_B)
  reversed_ = draw_all(z_BV[::-1], key_B[::-1])
  for b in range(6):
    alone = single(z_BV[b], key_B[b])
    for found in (batch, jax.tree.map(lambda x: x[::-1], reversed_)):
      assert found[0][b] == alone[0]
      # To the bit: equal as floats, and log mu is never a zero.
      assert found[1][b] == alone[1]


@settings(max_examples=50, deadline=None)
@given(_LOGITS, st.sampled_from([2, 5]), st.sampled_from([1.0, 0.8]))
def test_log_mu_sums_to_one_over_the_tokens_kept(logits, top_k, top_p):
  z_V = jnp.asarray(logits, jnp.float32)
  mask_V = _jitted_mask(top_k, top_p, 0.0)(z_V)
  log_mu_V = _log_mu_of_all(z_V, mask_V)
  probability_V = np.exp(np.asarray(log_mu_V, np.float64))
  assert abs(probability_V.sum() - 1.0) < 1e-6
  np.testing.assert_array_equal(probability_V > 0, mask_V)
  # Among the tokens kept the ratios are those of the softmax.
  kept = np.asarray(mask_V)
  np.testing.assert_allclose(
      np.asarray(log_mu_V)[kept] - np.asarray(log_mu_V)[kept].max(),
      np.asarray(z_V)[kept] - np.asarray(z_V)[kept].max(),
      atol=2e-6,
  )


@jax.jit
def _log_mu_of_all(z_V, mask_V):
  return jax.vmap(lambda token: sampling.log_mu(z_V, mask_V, token))(
      jnp.arange(z_V.shape[0])
  )


def test_log_mu_of_a_single_token_kept_and_of_a_greedy_row_is_zero():
  z_V = jnp.array([1.0, 5.0, 2.0])
  one_V = jnp.array([False, False, True])
  all_V = jnp.ones(3, bool)
  assert sampling.log_mu(z_V, one_V, jnp.int32(2)) == 0.0
  assert sampling.log_mu(z_V, all_V, jnp.int32(1), greedy=True) == 0.0
  assert sampling.log_mu(z_V, all_V, jnp.int32(1), greedy=False) < 0.0


def test_log_mu_of_large_logits_does_not_overflow():
  z_V = jnp.array([1000.0, 1000.0, -1000.0])
  found = sampling.log_mu(z_V, jnp.ones(3, bool), jnp.int32(0))
  np.testing.assert_allclose(found, -np.log(2.0), rtol=1e-6)
