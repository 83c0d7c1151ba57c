"""One kernel between decode's qkv dot and attention (Pallas, Triton backend).

A program has a few neighbouring heads of one slot. XLA would run three kernels
per layer for a few microseconds of work.

It is up to eight heads, a tile of [8, H] in registers of one warp; nothing goes
through shared memory. The two halves of a head's channels are separate arrays,
so a rotation needs no exchange. No sum is taken: a rotated number is two
products and their addition, each rounded by itself.

Lower bound of the time: a launch. 128 slots of a 7B move a few MB.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import DeferredScale, formats, quantize
from jetrl_jax.fp8.products import times
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.rope_append.reference import rotate_halves
from jetrl_jax.kernels.triton_tools import kernel_options

# Heads of a program, at most.
_MAX_HEADS = 8


def _kernel(*refs, heads: int, group: int, num_scales: int, has_bias: bool):
  """A few neighbouring heads of one slot: queries, keys or values."""
  qkv_ref, *refs = refs
  scale_refs, refs = refs[:num_scales], refs[num_scales:]
  bias_ref = refs.pop(0) if has_bias else None
  cos_ref, sin_ref, position_ref, table_ref, *refs = refs
  _, _, q_ref, keys_ref, values_ref = refs
  kv_heads, size, head_dim = keys_ref.shape[1:]
  half, first = head_dim // 2, pl.program_id(0) * group
  mine = pl.ds(first, group)

  def finished(channels):
    x = qkv_ref[mine, channels]
    if num_scales:
      scales = [scale[0] for scale in scale_refs]
      x = times(x.astype(jnp.float32), scales).astype(x.dtype)
    return x if bias_ref is None else x + bias_ref[mine, channels]

  halves = [pl.ds(0, half), pl.ds(half, half)]
  parts = [finished(channels) for channels in halves]
  cos, sin = cos_ref[...][None], sin_ref[...][None]
  rotated = rotate_halves(parts[0], parts[1], cos, sin)
  position = position_ref[0]
  last = jnp.maximum(position, 0)
  page, token = table_ref[lax.div(last, size)], lax.rem(last, size)

  def append(ref, head, parts, at):
    for channels, part in zip(halves, parts, strict=True):
      if ref.dtype == formats.E4M3:
        part = quantize(part, jnp.float32(1.0), formats.E4M3)
      place = ref.at[page, pl.ds(head, group), at[0], channels, *at[1:]]
      mask = jnp.broadcast_to(position >= 0, part.shape)
      triton.store(place, part.astype(ref.dtype), mask=mask)

  @pl.when(first < heads)
  def _queries():
    for channels, part in zip(halves, rotated, strict=True):
      q_ref[mine, channels] = part

  @pl.when((first >= heads) & (first < heads + kv_heads))
  def _keys():
    append(keys_ref, first - heads, rotated, (token,))

  @pl.when(first >= heads + kv_heads)
  def _values():
    is_paired = len(values_ref.shape) == 5
    at = (lax.div(token, 2), lax.rem(token, 2)) if is_paired else (token,)
    append(values_ref, first - heads - kv_heads, parts, at)


@lowered_once('interpret')
def rotate_and_append(
    qkv: DeferredScale,
    cos_BF: Array,
    sin_BF: Array,
    position_B: Array,
    table_BP: Array,
    k_PKSH: Array,
    values: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
  """Returns (queries, pages of keys, pages of values), see the package.

  The pages are written in place. `interpret` runs on a CPU, for tests.
  """
  batch, half = cos_BF.shape
  kv_heads, head_dim = k_PKSH.shape[1], 2 * half
  all_heads = qkv.values.shape[1] // head_dim
  heads = all_heads - 2 * kv_heads
  common = math.gcd(heads, kv_heads)
  group = min(common & -common, _MAX_HEADS)

  def of_slot(*shape):
    return pl.BlockSpec((None, *shape), lambda h, b: (b, *(0,) * len(shape)))

  def whole(*shape):
    return pl.BlockSpec(shape, lambda h, b: (0,) * len(shape))

  operands = [qkv.values.reshape(batch, all_heads, head_dim)]
  specs = [of_slot(all_heads, head_dim)]
  operands += [scale.reshape(1) for scale in qkv.scales]
  specs += [whole(1)] * len(qkv.scales)
  if qkv.bias_O is not None:
    operands.append(qkv.bias_O.reshape(all_heads, head_dim))
    specs.append(whole(all_heads, head_dim))
  operands += [cos_BF, sin_BF, position_B, table_BP, k_PKSH, values]
  specs += [of_slot(half)] * 2
  specs += [pl.BlockSpec((1,), lambda h, b: (b,)), of_slot(table_BP.shape[1])]
  pools = [whole(*k_PKSH.shape), whole(*values.shape)]
  q_BNH = jax.ShapeDtypeStruct((batch, heads, head_dim), qkv.values.dtype)
  return pl.pallas_call(
      functools.partial(
          _kernel,
          heads=heads,
          group=group,
          num_scales=len(qkv.scales),
          has_bias=qkv.bias_O is not None,
      ),
      grid=(all_heads // group, batch),
      in_specs=[*specs, *pools],
      out_specs=[of_slot(heads, head_dim), *pools],
      out_shape=[
          q_BNH,
          jax.ShapeDtypeStruct(k_PKSH.shape, k_PKSH.dtype),
          jax.ShapeDtypeStruct(values.shape, values.dtype),
      ],
      input_output_aliases={len(specs): 1, len(specs) + 1: 2},
      name='rotate_and_append',
      **kernel_options(interpret, 1),
  )(*operands)
