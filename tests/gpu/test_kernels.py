"""Kernels as a GPU runs them, against plain JAX: pytest --run-gpu tests/gpu.

Their formulas are tested on a CPU beside the code that uses them, interpreted.
What only a GPU has: conversions and functions of its instruction set, tensor
cores' order of addition, one array under two names, warps.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax import kernels
from jetrl_jax.config.model import SHAPES
from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.compilation import exact_jit, on_gpu
from jetrl_jax.fp8 import DeferredScale, formats, health, scaling_state
from jetrl_jax.fp8.quantization import QTensor, quantize
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.kernels import dispatch, kv_storage
from jetrl_jax.kernels.add_norm_quantize import mosaic_sm90 as norm
from jetrl_jax.kernels.attention import (
    mosaic_backward_sm90,
    mosaic_sm90,
    reference,
)
from jetrl_jax.kernels.decode_attention import mosaic_sm90 as attention_decode
from jetrl_jax.kernels.gate_up import mosaic_sm90 as gate_up
from jetrl_jax.kernels.log_sum_exp import mosaic_sm90 as log_sum_exp
from jetrl_jax.kernels.quantize_transpose import mosaic_sm90 as transpose
from jetrl_jax.kernels.requantize import changed_share, groups
from jetrl_jax.kernels.requantize import mosaic_sm90 as requantize
from jetrl_jax.kernels.rope_append import mosaic_sm90 as rope
from jetrl_jax.kernels.rope_append import reference as rope_reference
from jetrl_jax.kernels.sample_token import mosaic_sm90 as sample_token
from jetrl_jax.kernels.swiglu import mosaic_backward_sm90 as swiglu_backward
from jetrl_jax.kernels.swiglu import mosaic_sm90 as swiglu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not dispatch.has_mosaic()
        or dispatch.detect().capability not in ((), (9, 0)),
        reason='no Hopper GPU, or an older jax',
    ),
]

# So that the tests themselves can be tried where there is no GPU.
_HOW = {} if on_gpu() else {'interpret': True}
_TILE = 64


def _normal(seed: int, *shape: int, dtype=jnp.bfloat16, spread: float = 0.0):
  random = np.random.default_rng(seed)
  values = random.standard_normal(shape)
  values *= np.exp(spread * random.standard_normal(shape))
  return jnp.asarray(values, dtype)


def _bytes(x) -> np.ndarray:
  return np.atleast_1d(np.asarray(x)).view(np.uint8)


@pytest.mark.parametrize('dim', [576, 896, 3584, 8192])
def test_a_norm_has_the_bits_of_its_row_alone_and_quantises_as_xla_does(dim):
  x, gain = _normal(0, 256, dim, spread=1.0), _normal(1, dim)
  step = jnp.float32(2.0**-7)
  kernel = exact_jit(lambda x: norm.forward(x, gain, 1e-6, step, **_HOW)[1:])
  high, low = kernel(x)
  few, few_low = kernel(x[:16])
  assert np.array_equal(_bytes(few), _bytes(high[:16]))
  assert np.array_equal(_bytes(few_low), _bytes(low[:16]))
  wanted = exact_jit(lambda y: quantize(y, step, formats.E4M3))(high)
  assert np.array_equal(_bytes(low), _bytes(wanted))
  wide = np.asarray(x, np.float64)
  mean_square = np.mean(wide * wide, axis=1, keepdims=True)
  exact = wide / np.sqrt(mean_square + 1e-6) * np.asarray(gain, np.float64)
  # Two roundings to bfloat16.
  np.testing.assert_allclose(np.asarray(high, np.float64), exact, rtol=2.0**-7)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize('dim', [896, 3584])
def test_a_norm_that_adds_has_the_bits_of_the_sums_norm(dim, dtype):
  x, gain = _normal(0, 64, dim, dtype=dtype), _normal(1, dim, dtype=dtype)
  product = DeferredScale(
      values=_normal(2, 64, dim, dtype=jnp.float32, spread=2.0),
      scales=(jnp.float32(0.5), jnp.float32(0.25)),
  )
  step = jnp.float32(2.0**-7)

  @exact_jit
  def adds(x):
    return norm.forward(x, gain, 1e-6, step, product, copies=2, **_HOW)

  @exact_jit
  def plain(x):
    return norm.forward(x, gain, 1e-6, step, **_HOW)

  total, none, low = adds(x)
  exact = np.asarray(x, np.float64) + np.asarray(product.values, 'f8') / 8
  rounded = jnp.asarray(exact.astype(np.float32)).astype(dtype)
  assert none is None and np.array_equal(_bytes(total), _bytes(rounded))
  wanted = plain(total)[2]
  for copy in low:
    assert np.array_equal(_bytes(copy), _bytes(wanted))


# An odd number of heads is one that several warps repeat; 12 and 2 heads, and 2
# and 1, would be shared by different numbers of warps.
@pytest.mark.parametrize(
    'shape',
    [(28, 4, 128), (14, 2, 64), (9, 3, 64), (12, 2, 128), (2, 1, 64)],
)
@pytest.mark.parametrize('kind', ['bfloat16', 'float8_e4m3fn'])
def test_rotary_and_append_have_the_bits_of_the_plain_form(kind, shape):
  heads, kv_heads, head_dim = shape
  slots, pages, size = 16, 2, 128
  width = (heads + 2 * kv_heads) * head_dim
  qkv = DeferredScale(
      values=8 * _normal(0, slots, width),
      scales=(jnp.float32(0.5), jnp.float32(0.25)),
      bias_O=_normal(1, width),
  )
  pool = slots * pages, kv_heads, size, head_dim
  cache = (
      kv_storage.store(_normal(2, *pool), kind),
      kv_storage.store_values(_normal(3, *pool), kind),
  )
  # Slot 2 waits.
  position = jnp.arange(slots, dtype=jnp.int32) * 17 % (pages * size)
  position = position.at[2].set(-1)
  table = jnp.arange(slots * pages, dtype=jnp.int32)[::-1]
  angle = _normal(4, slots, head_dim // 2, dtype=jnp.float32, spread=2.0)
  table = table.reshape(slots, pages)
  operands = jnp.cos(angle), jnp.sin(angle), position, table, *cache
  found = exact_jit(
      lambda qkv, *args: rope.rotate_and_append(qkv, *args, **_HOW)
  )(qkv, *operands)
  wanted = exact_jit(rope_reference.rope_append)(qkv, *operands)
  for a, b, before in zip(found, wanted, (None, *cache), strict=True):
    assert np.array_equal(_bytes(a), _bytes(b))
    assert before is None or not np.array_equal(_bytes(a), _bytes(before))


def _tempered(vocab: int):
  """Returns 128 rows of logits, and half of them in float64."""
  z = _normal(0, 128, vocab, dtype=jnp.float32) * 5
  return (2 * z, jnp.full((128,), 0.5)), np.asarray(z, np.float64)


# Of Qwen and of Llama: 38 chunks in a power of two of them, and 32.
@pytest.mark.parametrize('vocab', [152064, 128256])
def test_a_log_sum_exp_has_the_bits_of_its_row_alone(vocab):
  operands, z = _tempered(vocab)
  kernel = exact_jit(lambda *a: log_sum_exp.row_stats(*a, **_HOW))
  lse, mean = kernel(*operands)
  few, few_mean = kernel(*(x[-16:] for x in operands))
  assert np.array_equal(few, lse[-16:]) and np.array_equal(few_mean, mean[-16:])
  exact = np.log(np.sum(np.exp(z), axis=1))
  np.testing.assert_allclose(lse, exact, rtol=1e-6)
  p = np.exp(z - exact[:, None])
  np.testing.assert_allclose(mean, np.sum(p * z, axis=1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize('vocab', [152064, 128256])
def test_a_draw_has_the_log_sum_exp_of_training(vocab):
  (logits, inverse), _ = _tempered(vocab)
  stats = exact_jit(lambda *a: log_sum_exp.row_stats(*a, **_HOW))
  draw = exact_jit(lambda *a: sample_token.draw(*a, **_HOW))
  keys = jnp.ones((16, 2), jnp.uint32)
  few = logits[:16], inverse[:16], keys, jnp.zeros((16,), bool)
  assert np.array_equal(draw(*few)[1], stats(logits, inverse)[0][:16])


def test_rows_draw_their_tokens_alone_and_with_their_probabilities():
  rows, vocab = (20000, 5000) if on_gpu() else (64, 5000)
  tokens, logits = np.array([0, 1500, 4095, 4096, 4999]), np.arange(5) / 2
  z = jnp.full((rows, vocab), -100.0).at[:, tokens].set(logits)
  keys = jax.random.bits(jax.random.key(0), (rows, 2), jnp.uint32)
  greedy = jnp.zeros((rows,), bool).at[3].set(True)
  draw = exact_jit(lambda *a: sample_token.draw(*a, **_HOW))
  arguments = 2 * z, jnp.full((rows,), 0.5), keys, greedy
  found = np.asarray(draw(*arguments)[0])
  few = [x[:16] for x in arguments]
  assert np.array_equal(draw(*few)[0], found[:16]) and found[3] == 4999
  seen = np.array([np.sum(found == token) for token in tokens])
  expected = rows * np.exp(logits) / np.exp(logits).sum()
  # 99.9% quantile of chi-square with 4 degrees of freedom.
  assert seen.sum() == rows
  assert ((seen - expected) ** 2 / expected).sum() < 18.47


def test_noise_is_that_of_the_plain_generator():
  z = _normal(0, 16, 5000, dtype=jnp.float32)
  keys = jax.random.bits(jax.random.key(1), (16, 2), jnp.uint32)
  arguments = z, jnp.ones((16,)), keys, jnp.zeros((16,), bool)
  found, wanted = (
      exact_jit(functools.partial(sample_token.draw, **how))(*arguments)[0]
      for how in (_HOW, {'interpret': True})
  )
  # A near tie may fall the other way: logarithms differ in their last bits.
  assert np.sum(np.asarray(found) != np.asarray(wanted)) <= 1


@pytest.mark.parametrize('dtype', [formats.E4M3, formats.E5M2])
def test_one_pass_turns_round_what_xla_quantises(dtype):
  x = _normal(0, 1024, 640, spread=4.0)
  scale, mask_M = jnp.float32(0.25), jnp.asarray(np.arange(1024) % 7 != 0, 'f4')
  valid = jnp.where(mask_M[:, None] > 0, x, 0)
  wanted = exact_jit(lambda x: quantize(x, scale, dtype))(valid)
  out = exact_jit(
      lambda x: tuple(
          jax.tree.leaves(
              vars(
                  transpose.quantize_and_transpose(
                      x, scale, mask_M, dtype, row_major=True, **_HOW
                  )
              )
          )
      )
  )(x)
  amax, quantization_error, row_major, transposed = out
  assert np.array_equal(_bytes(row_major), _bytes(wanted))
  assert np.array_equal(_bytes(transposed), _bytes(wanted).T)
  seen, sums = health.measure(x, QTensor(values=wanted, scale=scale), mask_M)
  assert amax == seen and np.array_equal(quantization_error[:2], sums[1:3])
  np.testing.assert_allclose(quantization_error[2:], sums[3:], rtol=1e-5)
  transposed = exact_jit(functools.partial(transpose.transpose, **_HOW))
  assert np.array_equal(_bytes(transposed(wanted)), _bytes(wanted).T)


@pytest.mark.parametrize('dtype', [formats.E4M3, formats.E5M2])
def test_swiglus_backward_has_the_bytes_of_xlas(dtype):
  from tests.kernels import test_swiglu_backward as cpu

  arguments = cpu.operands(2048 if on_gpu() else 128, 384)
  wanted = exact_jit(lambda *args: cpu.plain(*args, dtype))(*arguments)
  kernel = exact_jit(
      lambda *args: [
          vars(part) for part in swiglu_backward.backward(*args, dtype, **_HOW)
      ]
  )
  found, again = kernel(*arguments), kernel(*arguments)
  for a, b in zip(*map(jax.tree.leaves, (found, again)), strict=True):
    assert np.array_equal(_bytes(a), _bytes(b))
  # Exp and the reciprocal are the device's own.
  cpu.assert_like(found, wanted, others=2e-3)


@pytest.mark.skipif(not on_gpu(), reason='5 GB')
def test_rows_beyond_what_an_int32_counts_are_those_of_a_small_array():
  rows, columns = 2**16, 18944
  few, step = _normal(0, 128, 2 * columns), jnp.float32(2.0**-5)
  many = jnp.zeros((rows, 2 * columns), jnp.bfloat16).at[-128:].set(few)
  assert many.size > 2**31

  @exact_jit
  def run(x):
    h = swiglu.swiglu_of(DeferredScale(values=x), step)
    ones = jnp.ones((len(x),), jnp.float32)
    pair = transpose.quantize_and_transpose(
        x, step, ones, formats.E4M3, row_major=True
    )
    turned = transpose.transpose(pair.row_major_MN)
    return (
        h[-128:],
        pair.row_major_MN[-128:],
        pair.transposed_NM[:, -128:],
        turned[:, -128:],
    )

  for a, b in zip(run(many), run(few), strict=True):
    assert np.array_equal(_bytes(a), _bytes(b))


def test_swiglu_has_one_result_in_all_forms():
  from tests.kernels import test_swiglu as cpu

  rows = 2048 if on_gpu() else 128
  cpu.check(cpu.in_all_forms(rows, 4736, **_HOW))


@pytest.mark.parametrize('rows', gate_up.ROWS)
@pytest.mark.parametrize('shape', sorted(SHAPES))
def test_gate_up_with_swiglu_has_the_bits_of_many_rows(shape, rows):
  from tests.kernels import test_gate_up as cpu

  dims = SHAPES[shape].model_dim, SHAPES[shape].ffn_dim
  dims = dims if on_gpu() else (256, 320)
  many, weight, step = cpu.operands(1024, *dims, whole=not on_gpu())
  few = QTensor(values=many.values[-rows:], scale=many.scale)
  wanted = cpu.apart(many, weight, step, tuple(_HOW))[-rows:]
  found = gate_up.hidden(few, weight, step, **_HOW)
  assert np.array_equal(_bytes(found.values), _bytes(wanted))


@pytest.mark.parametrize('width', [64, 128])
@pytest.mark.parametrize('kind', [None, 'float8_e4m3fn'])
@pytest.mark.parametrize('last', [0, 63, 64, 200, 511])
@pytest.mark.parametrize('stages', [None, 2])
def test_decode_has_the_bits_of_the_training_forward(kind, last, stages, width):
  slots_, heads, group, keys, page = 4, 2, 7, 512, 128
  q = _normal(0, slots_, heads, group, width)
  k, v = (
      kv_storage.store(_normal(i, slots_, heads, keys, width), kind)
      for i in (1, 2)
  )
  ends = jnp.full((slots_, group), last, jnp.int32)
  forward = exact_jit(lambda *a: mosaic_sm90.forward(*a, **_HOW)[0])
  wanted = forward(q, k, v, jnp.zeros_like(ends), ends)

  def pages(x):
    x = x.reshape(slots_, heads, keys // page, page, width)
    return jnp.swapaxes(x, 1, 2).reshape(-1, heads, page, width)

  values = kv_storage.pair(pages(v)) if kind else pages(v)
  table = jnp.arange(slots_ * keys // page, dtype=jnp.int32)

  def decode(*args):
    return attention_decode.decode(*args, stages=stages, **_HOW)

  found = exact_jit(decode)(
      q.reshape(slots_, heads * group, width),
      pages(k),
      values,
      table.reshape(slots_, -1),
      jnp.full((slots_,), last, jnp.int32),
  )
  assert np.array_equal(_bytes(found.reshape(wanted.shape)), _bytes(wanted))


@pytest.mark.parametrize('width', [64, 128])
def test_attention_and_its_gradients_are_those_of_the_plain_form(width):
  tokens, group = 384, 2
  q, dout = (_normal(i, 1, 2, tokens * group, width) for i in (0, 3))
  k, v = (_normal(i, 1, 2, tokens, width) for i in (1, 2))
  # Two segments, the second from the third tile on.
  index = np.arange(tokens, dtype=np.int32)
  first = np.repeat(np.where(index < 128, 0, 128), group)[None].astype(np.int32)
  last = np.repeat(index, group)[None]
  wide = [x.astype(jnp.float32) for x in (q, k, v)]
  out, lse = reference.forward(*wide, first, last, _TILE)
  plain = reference.backward(
      *wide, first, last, out, lse, dout.astype(jnp.float32)
  )
  kernel_out, kernel_lse = mosaic_sm90.forward(q, k, v, first, last, **_HOW)
  operands = q, k, v, first, last, kernel_out, kernel_lse, dout
  grads, again = (
      mosaic_backward_sm90.backward(*operands, **_HOW) for _ in range(2)
  )
  assert all(map(np.array_equal, map(_bytes, grads), map(_bytes, again)))
  for found, wanted in zip((kernel_out, *grads), (out, *plain), strict=True):
    error = np.asarray(found, np.float64) - np.asarray(wanted, np.float64)
    # bfloat16 weights and results.
    assert np.linalg.norm(error) < 2.0**-7 * np.linalg.norm(wanted)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_a_kernel_is_requantised_in_place_as_xla_does_it(dtype):
  recipe = Recipe(name='fp8_delayed')
  before = {'out': {'kernel': _normal(0, 512, 640, dtype=dtype, spread=3.0)}}
  # Every second row moves.
  moved = jax.tree.map(lambda x: x.at[::2].multiply(1.5), before)
  state = scaling_state.observe_kernels(
      scaling_state.init_state(before, recipe), before, recipe, Axes()
  )
  old = kernels.prepare_weights(before, state, recipe)
  wanted = jax.jit(lambda p, s, o: kernels.requantize_weights(p, s, o, recipe))(
      moved, state, old
  )
  share = changed_share(old, wanted, Axes())['out']['kernel']
  kernel = functools.partial(requantize.requantize_kernel, **_HOW)
  in_place = jax.jit(
      lambda p, s, o: groups.requantize(kernel, p, s, o, recipe, Axes()),
      donate_argnums=(2,),
  )
  new, _, changed = in_place(moved, state, jax.tree.map(jnp.copy, old))
  found, expected = new['out']['kernel'], wanted['out']['kernel']
  assert np.array_equal(_bytes(found.values), _bytes(expected.values))
  np.testing.assert_allclose(changed['out']['kernel'], share, rtol=1e-6)
  assert 0.1 < share <= 0.5


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('at_random', [False, True])
def test_the_optimisers_kernel_moves_as_xla_does(at_random, dtype):
  from tests.kernels import test_adamw as cpu

  if at_random and dtype == 'float32':
    pytest.skip('only bfloat16 masters are rounded at random')
  both = cpu._Both(jnp.dtype(dtype), at_random)
  part = both.start
  for step in range(3):
    arguments = part, both.gradients(step), both.step_control(step)
    found, again = both.kernel(*arguments), both.kernel(*arguments)
    wanted = both.reference(*arguments)
    for a, b in zip(*map(jax.tree.leaves, (found, again)), strict=True):
      assert np.array_equal(_bytes(a), _bytes(b))
    pairs = zip(
        jax.tree.leaves((found[0], cpu._decoded(found[1]))),
        jax.tree.leaves((wanted[0], cpu._decoded(wanted[1]))),
        strict=True,
    )
    for a, b in pairs:
      a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
      # One stored value in five hundred may be its neighbour.
      assert np.mean(np.abs(a - b) > 1e-3 * np.abs(b) + 1e-12) < 2e-3
    part = wanted
