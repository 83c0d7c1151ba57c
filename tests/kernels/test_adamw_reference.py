import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jetrl_jax.kernels.adamw import reference as adamw_reference

TINY = float(np.finfo(np.float32).tiny)
HUGE = float(np.finfo(np.float32).max)


@functools.cache
def _compiled(group_size):
  codec = adamw_reference.fp8_codec(group_size)
  return jax.jit(codec.encode), jax.jit(codec.decode)


def round_trip(x, group_size=128):
  encode, decode = _compiled(group_size)
  encoded = encode(jnp.asarray(x, jnp.float32))
  return encoded, np.asarray(decode(encoded))


def wide_groups(rng, rows, columns):
  """Signed values; each row spans its own number of bits, 0 to 250."""
  span = rng.uniform(0, 125, (rows, 1))
  exponent = rng.uniform(-1, 1, (rows, columns)) * span
  sign = rng.choice([-1.0, 1.0], (rows, columns))
  return (sign * np.exp2(exponent)).astype(np.float32)


def test_the_worked_example_of_the_docstring_holds():
  # M = 2^-10, m = 2^-34: k = floor(16 * 16.61 / 24) / 16 = 11/16.
  # c = 2^-22, scale = 2^(12 * 11/16) / 448 = 2^8.25 / 448 = 0.6796.
  # M is stored as 448. m is 2^-8.25 / 0.6796 = 0.00483 = 2.47 * 2^-9, so 2^-8.
  x = np.zeros((1, 128), np.float32)
  x[0, 3], x[0, 7] = 2.0**-10, -(2.0**-34)
  encoded, decoded = round_trip(x)
  assert encoded.k[0, 0] == 11 / 16
  np.testing.assert_allclose(encoded.c[0, 0], 2.0**-22, rtol=1e-6)
  np.testing.assert_allclose(encoded.scale[0, 0], 0.6796, rtol=1e-4)
  assert float(encoded.values[0, 3]) == 448.0
  assert float(encoded.values[0, 7]) == -(2.0**-8)
  np.testing.assert_allclose(decoded[0, 3], 2.0**-10, rtol=1e-5)
  np.testing.assert_allclose(decoded[0, 7] / x[0, 7], 0.73, atol=0.01)
  assert np.count_nonzero(decoded) == 2


def test_without_the_expansion_the_same_value_would_be_lost():
  # 448 * 2^-24 = 0.0000267 is far below E4M3's half step at zero, 2^-10.
  plain = jnp.float32(2.0**-34 / (2.0**-10 / 448)).astype(jnp.float8_e4m3fn)
  assert float(plain) == 0.0


def test_the_error_stays_within_the_derived_bound():
  x = wide_groups(np.random.default_rng(0), 400, 128)
  encoded, decoded = round_trip(x)
  k = np.asarray(encoded.k, np.float64)
  x64 = np.abs(x.astype(np.float64))
  largest = x64.max(axis=1, keepdims=True)
  # The magnitude before rounding, in exact arithmetic: 448 (|x| / M)^k.
  u = 448 * (x64 / largest) ** k
  # E4M3 moves u by half a step: 2^-4 relative, or 2^-10 where it is subnormal.
  d = np.maximum(2.0**-4, 2.0**-10 / u)
  # float32: a power whose exponent of 2 is at most 9 in size is good to about
  # 9 * 2^-23, and so is its inverse times 1 / k.
  slack = 1 + 30 * 2.0**-23 / k
  ratio = decoded.astype(np.float64) / x
  assert np.all(ratio <= (1 + d) ** (1 / k) * slack)
  assert np.all(ratio >= (1 - d) ** (1 / k) / slack)
  assert np.all(u >= 1 / 224 * (1 - 1e-5))


def test_k_follows_its_formula():
  x = wide_groups(np.random.default_rng(1), 200, 128)
  encoded, _ = round_trip(x)
  magnitude = np.abs(x.astype(np.float64))
  bits = np.log2(magnitude.max(axis=1) / magnitude.min(axis=1))
  steps = 16 * np.log2(448**2 / 2) / bits
  expected = np.clip(np.floor(steps) / 16, 1 / 16, 16)
  # Within 1e-4 of a step's edge float32 may floor to either side.
  clear = np.abs(steps - np.round(steps)) > 1e-4 * steps
  assert clear.sum() > 150
  np.testing.assert_array_equal(
      np.asarray(encoded.k)[clear, 0], expected[clear].astype(np.float32)
  )


def test_nothing_that_was_nonzero_becomes_zero():
  x = np.abs(wide_groups(np.random.default_rng(2), 300, 128))
  x[:, ::5] = 0
  _, decoded = round_trip(x)
  np.testing.assert_array_equal(decoded == 0, x == 0)


def test_a_group_of_zeros_has_unit_scale_k_and_c():
  encoded, decoded = round_trip(np.zeros((2, 256)))
  for array in (encoded.scale, encoded.k, encoded.c):
    np.testing.assert_array_equal(array, np.ones((2, 2)))
  np.testing.assert_array_equal(decoded, np.zeros((2, 256)))


@pytest.mark.parametrize('value', [3.7e-5, -2.0, TINY, -HUGE, 1e-30])
def test_a_group_of_equal_magnitudes_decodes_to_itself(value):
  # log2(M / m) = 0: k is clamped to 16, every |q| is 448.
  x = np.full((1, 128), value, np.float32)
  x[0, 100:] = 0
  encoded, decoded = round_trip(x)
  assert encoded.k[0, 0] == 16
  np.testing.assert_allclose(decoded, x, rtol=2e-6)


def test_finite_values_of_any_size_stay_finite():
  rng = np.random.default_rng(3)
  # Every bit pattern of float32 is as likely as any other: half of the groups
  # span almost the whole range, and subnormals are among them.
  bits = rng.integers(0, 2**32, (4096, 128), np.uint64).astype(np.uint32)
  x = bits.view(np.float32)
  x = np.where(np.isfinite(x), x, 0)
  x[::7] *= rng.random(x[::7].shape) < 0.02
  x[5] = HUGE
  x[6] = np.float32(1e-45)
  x[7, 0], x[7, 1:] = HUGE, TINY
  encoded, decoded = round_trip(x)
  for array in (encoded.values, encoded.scale, encoded.k, encoded.c, decoded):
    assert np.all(np.isfinite(np.asarray(array, np.float32)))
  normal = np.abs(x) >= TINY
  np.testing.assert_array_equal(decoded != 0, normal)
  np.testing.assert_array_equal(
      np.sign(decoded), np.where(normal, np.sign(x), 0)
  )


def test_a_value_that_is_not_finite_stays_visible():
  x = np.ones((2, 128), np.float32)
  x[0, 5], x[1, 5] = np.nan, np.inf
  _, decoded = round_trip(x)
  assert not np.any(np.isfinite(decoded[:, 5]))


@pytest.mark.parametrize('shape', [(), (1,), (5,), (130,), (3, 200), (2, 3, 7)])
def test_any_shape_keeps_its_shape(shape):
  x = np.random.default_rng(4).normal(size=shape).astype(np.float32) + 3
  encoded, decoded = round_trip(x)
  assert encoded.values.shape == shape and decoded.shape == shape
  groups = (*shape[:-1], -(-shape[-1] // 128)) if shape else ()
  assert encoded.scale.shape == encoded.k.shape == encoded.c.shape == groups
  # Spans below 2^16: at most 22%, see the module's docstring.
  np.testing.assert_allclose(decoded, x, rtol=0.22)


def test_padding_has_no_part_in_a_group():
  # The last two values form a short group of their own. Were the padding's
  # zeros counted in m, k would be at its lower clamp instead of its upper one.
  x = np.full((1, 130), 7.0, np.float32)
  encoded, decoded = round_trip(x)
  np.testing.assert_array_equal(encoded.k, [[16, 16]])
  np.testing.assert_allclose(decoded, x, rtol=2e-6)


def test_a_row_does_not_depend_on_the_other_rows():
  x = wide_groups(np.random.default_rng(5), 8, 200)
  encode, _ = _compiled(128)
  whole = encode(x)
  for row in range(8):
    alone = encode(x[row : row + 1])
    for a, b in zip(
        jax.tree.leaves(whole), jax.tree.leaves(alone), strict=True
    ):
      np.testing.assert_array_equal(
          np.asarray(a[row], np.float32), np.asarray(b[0], np.float32)
      )


def test_a_value_takes_one_byte_and_its_share_of_a_group():
  state = jax.eval_shape(
      adamw_reference.scale_by_adam(codec=adamw_reference.fp8_codec()).init,
      {'kernel': jnp.ones((32, 256))},
  )
  stored = sum(
      a.size * a.dtype.itemsize for a in jax.tree.leaves((state.mu, state.nu))
  )
  assert stored == 2 * 32 * 256 * (1 + 12 / 128)


def test_a_group_size_below_one_is_refused():
  with pytest.raises(ValueError, match='group_size is 0; it must be 1 or more'):
    adamw_reference.fp8_codec(0)


def make_params(dtype=jnp.float32):
  rng = np.random.default_rng(6)
  shapes = {'kernel': (24, 160), 'bias': (24,), 'scale': ()}
  return {
      name: jnp.asarray(rng.normal(size=shape), dtype)
      for name, shape in shapes.items()
  }


def gradients(params, step):
  """Noisy, of sizes that vary over the leaf, sometimes 0."""
  rng = np.random.default_rng(step)

  def leaf(p):
    size = np.exp2(rng.uniform(-20, 2, p.shape))
    g = rng.normal(size=p.shape) * size * (rng.random(p.shape) < 0.9)
    return jnp.asarray(g, p.dtype) + 1e-3 * p

  return jax.tree.map(leaf, params)


def run(optimizer, params, steps, jit):
  def step(params, state, grads):
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  step = jax.jit(step) if jit else step
  state = jax.jit(optimizer.init)(params)
  for i in range(steps):
    params, state = step(params, state, gradients(params, i))
  return params, state


def assert_same_bits(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize('jit', [False, True])
def test_with_the_float32_codec_it_is_optax_adamw_to_the_bit(jit):
  rate = optax.warmup_cosine_decay_schedule(0.0, 0.01, 5, 40)
  mask = {'kernel': True, 'bias': False, 'scale': False}
  ours = adamw_reference.adamw(
      rate, 0.9, 0.95, 1e-7, 0.1, mask, codec=adamw_reference.float32_codec()
  )
  theirs = optax.adamw(
      rate, b1=0.9, b2=0.95, eps=1e-7, weight_decay=0.1, mask=mask
  )
  steps = 40 if jit else 12
  params = make_params()
  assert_same_bits(
      run(ours, params, steps, jit), run(theirs, params, steps, jit)
  )


def test_the_defaults_are_those_of_optax():
  params = make_params()
  assert_same_bits(
      run(
          adamw_reference.adamw(0.01, codec=adamw_reference.float32_codec()),
          params,
          3,
          True,
      ),
      run(optax.adamw(0.01), params, 3, True),
  )


def test_the_first_update_is_exact_in_8_bits():
  # The codec works between steps; nothing has been encoded yet but zeros. An
  # update is at most the learning rate, 0.01: 1e-8 is a rounding of it.
  params = {'kernel': make_params()['kernel']}
  eight, _ = run(
      adamw_reference.adamw(0.01, codec=adamw_reference.fp8_codec()),
      params,
      1,
      True,
  )
  exact, _ = run(optax.adamw(0.01), params, 1, True)
  for a, b in zip(jax.tree.leaves(eight), jax.tree.leaves(exact), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)


def test_a_leaf_is_moved_as_by_the_transformation():
  numbers = {'b1': 0.9, 'b2': 0.95, 'eps': 1e-3}
  optimizer = adamw_reference.adamw(
      lambda count: 1e-2 / (1 + count),
      **numbers,
      weight_decay=0.1,
      codec=adamw_reference.fp8_codec(),
  )
  clip, x = 0.5, jax.random.normal(jax.random.key(0), (2, 256))
  state = optimizer.init(x)
  update = jax.jit(
      functools.partial(adamw_reference.update, **numbers, decay=0.1)
  )
  for step in range(3):
    gradient = jax.random.normal(jax.random.key(step + 1), x.shape)
    adam, factors = state[0], [clip, *optimizer.rates(state)]
    leaf = x, gradient, adam.mu, adam.nu
    moved, *_, amax = update(*leaf, jnp.stack([1.0, *factors]), None)
    kept = update(*leaf, jnp.stack([0.0, *factors]), None)[:3]
    chex.assert_trees_all_equal(kept, (x, adam.mu, adam.nu))
    change, state = optimizer.update(gradient * clip, state, x)
    np.testing.assert_allclose(moved - x, change, rtol=1e-3, atol=1e-6)
    x = x + change
    np.testing.assert_allclose(amax, jnp.abs(x).max(), rtol=1e-6)


def noisy_quadratic(codec, steps=300):
  """Losses of an ill-conditioned quadratic: curvatures from 2^-8 to 2^4."""
  rng = np.random.default_rng(7)
  curvature = jnp.asarray(np.exp2(rng.uniform(-8, 4, (8, 256))), jnp.float32)
  target = jnp.asarray(rng.normal(size=(8, 256)), jnp.float32)
  optimizer = adamw_reference.adamw(
      0.01, 0.9, 0.95, weight_decay=0.0, codec=codec
  )

  def loss(params):
    return jnp.mean(curvature * (params - target) ** 2)

  @jax.jit
  def step(params, state, noise):
    value, grads = jax.value_and_grad(loss)(params)
    grads = grads * (1 + 0.5 * noise)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  params = jnp.zeros((8, 256))
  state, losses = jax.jit(optimizer.init)(params), []
  for _ in range(steps):
    noise = jnp.asarray(rng.normal(size=(8, 256)), jnp.float32)
    params, state, value = step(params, state, noise)
    losses.append(float(value))
  return losses


def test_8_bit_moments_optimise_as_exact_ones_do():
  exact = noisy_quadratic(adamw_reference.float32_codec())
  eight = noisy_quadratic(adamw_reference.fp8_codec())
  assert exact[-1] < 0.01 * exact[0]
  # The way down takes the same number of steps, within a tenth.
  for share in (0.5, 0.1, 0.02):
    when = [
        next(i for i, v in enumerate(run) if v < share * run[0])
        for run in (exact, eight)
    ]
    assert abs(when[0] - when[1]) <= 0.1 * when[0] + 1


def test_an_encoded_state_is_a_tree_of_arrays_that_keeps_its_types():
  params = make_params()
  optimizer = adamw_reference.scale_by_adam(codec=adamw_reference.fp8_codec())
  state = jax.jit(optimizer.init)(params)
  _, after = jax.eval_shape(optimizer.update, gradients(params, 0), state)
  assert isinstance(after.mu['kernel'], adamw_reference.EncodedMoment)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
      lambda x: (x.shape, x.dtype), after
  )


def test_groups_stay_on_their_device_when_rows_are_sharded():
  mesh = jax.make_mesh(
      (8,), ('fsdp',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('fsdp'))
  x = wide_groups(np.random.default_rng(8), 16, 256)
  codec = adamw_reference.fp8_codec()
  encode = jax.jit(codec.encode, in_shardings=rows, out_shardings=rows)
  compiled = str(encode.lower(x).compile().as_text())
  for collective in ('all-gather', 'all-reduce', 'all-to-all', 'permute'):
    assert collective not in compiled
  sharded, one = encode(x), jax.jit(codec.encode)(x)
  for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(one), strict=True):
    np.testing.assert_array_equal(
        np.asarray(a, np.float32), np.asarray(b, np.float32)
    )


@pytest.mark.parametrize('shape', [(), (5,), (3, 130), (2, 3, 256)])
def test_the_state_of_zeros_is_what_encoding_zeros_gives(shape):
  codec = adamw_reference.fp8_codec()
  zeros = jnp.zeros(shape, jnp.float32)
  chex.assert_trees_all_equal(codec.zeros(zeros), _compiled(128)[0](zeros))
