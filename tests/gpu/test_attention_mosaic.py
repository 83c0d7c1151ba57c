"""Attention as a Hopper GPU runs it: one row's bits in every form."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core.compilation import exact_jit, on_gpu
from jetrl_jax.kernels import dispatch, kv_storage
from jetrl_jax.kernels.attention import flash_attention, mosaic_sm90
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
_TILE = 64
_PROGRAMS = [
    mosaic_sm90.Program(groups, stages)
    for groups, stages in ((1, 3), (2, 2), (2, 4), (3, 3))
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


@pytest.mark.parametrize('program', _PROGRAMS)
@pytest.mark.parametrize('kind', [None, _FP8])
def test_every_program_has_the_same_bits(kind, program):
  tokens = 1024 if on_gpu() else 320
  operands = _packed(64, kind, tokens, 7 if on_gpu() else 1)
  outs = [
      exact_jit(functools.partial(mosaic_sm90.forward, **how, **_HOW))(
          *operands
      )
      for how in ({}, {'program': program})
  ]
  for found, wanted in zip(*outs, strict=True):
    assert np.array_equal(_bytes(found), _bytes(wanted))


@pytest.mark.parametrize('width', [64, 128])
@pytest.mark.parametrize('kind', [None, _FP8])
@pytest.mark.parametrize('last', [0, 31, 64, 511])
def test_decode_has_the_bits_of_training(kind, width, last):
  slots, heads, group, keys, page = 4, 2, 7, 512, 128
  q = 2 * _normal(0, slots, heads, group, width)
  k, v = (_normal(i, slots, heads, keys, width) for i in (1, 2))
  ends = jnp.full((slots, group), last, jnp.int32)
  table = dispatch.select('reference').replace(
      attention='mosaic_sm90', decode_attention='mosaic_sm90'
  )

  def pages(x):
    x = x.reshape(slots, heads, keys // page, page, width)
    return jnp.swapaxes(x, 1, 2).reshape(-1, heads, page, width)

  def both(q, k, v):
    with kernels_in_use.run(table):
      training = flash_attention(q, k, v, 0 * ends, ends, group, _TILE, kind)
      decoded = decode_attention(
          q.reshape(slots, heads * group, width),
          kv_storage.store(pages(k), kind),
          kv_storage.store_values(pages(v), kind),
          jnp.arange(slots * keys // page, dtype=jnp.int32).reshape(slots, -1),
          jnp.full((slots,), last, jnp.int32),
          _TILE,
      )
    return training, decoded.reshape(training.shape)

  assert np.array_equal(*map(_bytes, exact_jit(both)(q, k, v)))
