"""Attention in Mosaic's form, for heads and tiles that `auto` leaves to Triton.

On a Hopper GPU: pytest --run-gpu tests/gpu/test_attention_mosaic.py. Where the
bits agree, `mosaic_sm90.was_run` may say so.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core.compilation import exact_jit, on_gpu
from jetrl_jax.kernels import dispatch, kv_storage
from jetrl_jax.kernels.attention import (
    flash_attention,
    mosaic_backward_sm90,
    mosaic_sm90,
    reference,
    triton,
    triton_backward,
)
from jetrl_jax.kernels.decode_attention import decode_attention
from tests import kernels_in_use

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
_FP8 = 'float8_e4m3fn'
# Key dtype, channels and tile. Decode takes FP8 keys in tiles of 32 at least.
_SHAPES = [
    *((kind, 64, tile) for kind in (None, _FP8) for tile in (64, 32)),
    (None, 64, 16),
    *((kind, 128, 32) for kind in (None, _FP8)),
    *((None, width, 16) for width in (128, 32, 16)),
    *((_FP8, width, 32) for width in (32, 16)),
]
_PROGRAMS = [
    mosaic_sm90.Program(groups, stages, ahead)
    for groups, stages in ((1, 3), (2, 2), (2, 3), (2, 4), (3, 3))
    for ahead in (False, True)
]


def _normal(seed: int, *shape: int):
  values = np.random.default_rng(seed).standard_normal(shape)
  return jnp.asarray(values, jnp.bfloat16)


def _bytes(x) -> np.ndarray:
  return np.atleast_1d(np.asarray(x)).view(np.uint8)


def _packed(width: int, kind: str | None, tokens: int, group: int):
  """Two rows of four segments, with padding; and a row of padding alone."""
  q = 2 * _normal(0, 3, 2, tokens * group, width)
  k, v = (
      kv_storage.store(_normal(i, 3, 2, tokens, width), kind) for i in (1, 2)
  )
  index = np.arange(tokens)
  # In units of 64 tokens; the last segment has the longest loop.
  starts = 64 * np.array([0, 1, 3, 4])
  first = starts[np.searchsorted(starts, index, side='right') - 1]
  ends = {64: 1, 192: 30, 256: 17, tokens: 5}
  last = index.copy()
  for end, padding in ends.items():
    last[end - padding : end] = -1
  spans = (
      jnp.asarray(np.repeat(np.stack(x), group, axis=1), jnp.int32)
      for x in ((first, first, 0 * first), (last, last, 0 * last - 1))
  )
  return q, k, v, *spans


@pytest.mark.parametrize('kind, width, tile', _SHAPES)
def test_packed_rows_have_the_bits_of_tritons_form(kind, width, tile):
  tokens = 1024 if on_gpu() else 320
  operands = _packed(width, kind, tokens, 7 if on_gpu() else 1)
  assert mosaic_sm90.fits(operands[0], tile)
  outs = [
      exact_jit(functools.partial(module.forward, tile=tile, **_HOW))(
          *operands
      )[0]
      for module in (triton, mosaic_sm90)
  ]
  assert np.any(np.asarray(outs[0]) != 0)
  assert np.array_equal(*map(_bytes, outs))


@pytest.mark.parametrize('program', _PROGRAMS)
@pytest.mark.parametrize('kind', [None, _FP8])
def test_every_program_has_the_same_bits(kind, program):
  tokens = 1024 if on_gpu() else 320
  operands = _packed(64, kind, tokens, 7 if on_gpu() else 1)
  outs = [
      exact_jit(functools.partial(mosaic_sm90.forward, tile=64, **how, **_HOW))(
          *operands
      )
      for how in ({}, {'program': program})
  ]
  for found, wanted in zip(*outs, strict=True):
    assert np.array_equal(_bytes(found), _bytes(wanted))


@pytest.mark.parametrize(
    'kind, width, tile, decode_in',
    [
        *((*shape, 'triton') for shape in _SHAPES),
        *((kind, 64, 64, 'mosaic_sm90') for kind in (None, _FP8)),
    ],
)
@pytest.mark.parametrize('last', [0, 31, 64, 511])
def test_decode_has_the_bits_of_training(kind, width, tile, decode_in, last):
  slots, heads, group, keys, page = 4, 2, 7, 512, 128
  q = 2 * _normal(0, slots, heads, group, width)
  k, v = (_normal(i, slots, heads, keys, width) for i in (1, 2))
  ends = jnp.full((slots, group), last, jnp.int32)
  table = dispatch.select('reference').replace(
      attention='mosaic_sm90', decode_attention=decode_in
  )

  def pages(x):
    x = x.reshape(slots, heads, keys // page, page, width)
    return jnp.swapaxes(x, 1, 2).reshape(-1, heads, page, width)

  def both(q, k, v):
    with kernels_in_use.run(table):
      training = flash_attention(q, k, v, 0 * ends, ends, tile, kind)
      decoded = decode_attention(
          q.reshape(slots, heads * group, width),
          kv_storage.store(pages(k), kind),
          kv_storage.store_values(pages(v), kind),
          jnp.arange(slots * keys // page, dtype=jnp.int32).reshape(slots, -1),
          jnp.full((slots,), last, jnp.int32),
          tile,
      )
    return training, decoded.reshape(training.shape)

  assert np.array_equal(*map(_bytes, exact_jit(both)(q, k, v)))


@pytest.mark.parametrize(
    'width, tile', [(64, 64), (64, 32), (64, 16), (32, 16), (16, 16)]
)
def test_gradients_repeat_and_are_those_of_the_other_forms(width, tile):
  # The last tile of 64 keys is not whole.
  tokens, group = 320 + tile % 64, 2
  operands = _packed(width, None, tokens, group)
  out, lse = exact_jit(functools.partial(triton.forward, tile=tile, **_HOW))(
      *operands
  )
  operands = *operands, out, lse, _normal(3, *out.shape)

  def of(module):
    run = functools.partial(module.backward, tile=tile, **_HOW)
    return exact_jit(run)(*operands)

  found, again = of(mosaic_backward_sm90), of(mosaic_backward_sm90)
  assert all(map(np.array_equal, map(_bytes, found), map(_bytes, again)))
  wide = [
      x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in operands
  ]
  plain = jax.jit(reference.backward)(*wide)
  for grad, near, wanted in zip(found, of(triton_backward), plain, strict=True):
    grad, near, wanted = (
        np.asarray(x, np.float64) for x in (grad, near, wanted)
    )
    # bfloat16 weights and results; sums in another order.
    assert np.linalg.norm(grad - wanted) < 2.0**-7 * np.linalg.norm(wanted)
    assert np.linalg.norm(grad - near) < 2.0**-10 * np.linalg.norm(near)
