"""One kernel between decode's qkv dot and attention, for Hopper GPUs (Mosaic).

A program is one warpgroup and has all heads of one slot, as three tiles
[heads, H / 2] for each half of the channels: queries, keys, values. A warp has
a few whole heads, and a thread the same channels of both halves, so that a
rotation needs no exchange. Everything is in registers, read straight from
memory and written straight to the pages; there is no shared memory, and no
barrier. A number of heads that is no multiple of four is shared by one or two
warps, and the others repeat them: they write the same bytes.

No sum is taken: a rotated number is two products and their addition, each
rounded by itself.

Lower bound of the time: a launch and three round trips to memory, one after the
other: the position, the page's number, the page. 128 slots of a 7B move 3 MB,
which is less than a microsecond; an H100 takes 2.1 for all.
"""

# jax 0.10, which the types are checked with, lacks some of it.
# pyright: reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8 import DeferredScale, formats
from jetrl_jax.fp8.products import times
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.calls import lowered_once
from jetrl_jax.kernels.rope_append.reference import rotate_halves

_HEAD_DIMS = 64, 128, 256


def fits(head_dim: int) -> bool:
  """Whether the kernel takes heads of so many channels."""
  return head_dim in _HEAD_DIMS


def _warps(heads: int, kv_heads: int) -> dict[int, int]:
  """Returns how many warps share so many heads: of queries, and of keys.

  Queries and keys read the same angles, and JAX reads them once. Their layout
  for two warps is another one than for one or four, which have the same; there
  is no way from one to the other, and the search for it takes half a minute.
  So if either has two warps, queries have as many as keys.
  """
  of = {n: min(n & -n, tools.WARPS) for n in (heads, kv_heads)}
  if 2 in of.values():
    of[heads] = of[kv_heads]
  return of


def _kernel(*refs, num_scales: int, has_bias: bool, interpret: bool):
  """All heads of a slot."""
  qkv_ref, *refs = refs
  scale_refs, refs = refs[:num_scales], refs[num_scales:]
  bias_ref = refs.pop(0) if has_bias else None
  cos_ref, sin_ref, position_ref, table_ref, *refs = refs
  keys_ref, values_ref, q_ref = refs
  kv_heads, size, head_dim = keys_ref.shape[1:]
  heads, half = q_ref.shape[1], head_dim // 2
  slot = lax.axis_index('slot')
  position = position_ref[slot]
  last = jnp.maximum(position, 0)
  page = table_ref[slot, lax.div(last, jnp.int32(size))]
  token = lax.rem(last, jnp.int32(size))
  halves = [pl.ds(0, half), pl.ds(half, half)]
  is_paired = len(values_ref.shape) == 5
  scales = [scale[0] for scale in scale_refs]
  warps = _warps(heads, kv_heads)

  def finished(first: int, count: int, vector: int):
    """Returns both halves of some heads."""
    mine = pl.ds(first, count)
    layout = tools.rows_in_warps(vector, warps[count])

    def of(channels):
      x = tools.read(qkv_ref.at[slot, mine, channels], layout)
      if scales:
        x = times(x.astype(jnp.float32), scales).astype(x.dtype)
      if bias_ref is None:
        return x
      return x + tools.read(bias_ref.at[mine, channels], layout)

    return of(halves[0]), of(halves[1])

  def rotated(first: int, count: int):
    vector = half // tools.LANES
    one, other = finished(first, count, vector)
    layout = tools.rows_in_warps(vector, warps[count])

    def angles(ref):
      of_slot = tools.read(ref.at[slot], layout.reduce(0))
      each = lax.broadcast_in_dim(of_slot, (count, half), [1])
      return plgpu.layout_cast(each, layout)

    return rotate_halves(one, other, angles(cos_ref), angles(sin_ref))

  queries = rotated(0, heads)
  keys = rotated(heads, kv_heads)
  # Bytes that alternate with those of the next token are stored one by one.
  vector = 1 if is_paired else half // tools.LANES
  values = finished(heads + kv_heads, kv_heads, vector)
  for channels, part in zip(halves, queries, strict=True):
    tools.write(q_ref.at[slot, :, channels], part)

  def append(ref, parts, at):
    for channels, part in zip(halves, parts, strict=True):
      if ref.dtype == formats.E4M3:
        part = tools.quantized(part, 1.0, interpret)
      place = ref.at[page, :, at[0], channels, *at[1:]]
      tools.write(place, part.astype(ref.dtype))

  @pl.when(position >= 0)
  def _():
    append(keys_ref, keys, (token,))
    two = jnp.int32(2)
    pair = lax.div(token, two), lax.rem(token, two)
    append(values_ref, values, pair if is_paired else (token,))


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
  operands = [qkv.values.reshape(batch, all_heads, head_dim)]
  operands += [scale.reshape(1) for scale in qkv.scales]
  if qkv.bias_O is not None:
    operands.append(qkv.bias_O.reshape(all_heads, head_dim))
  operands += [cos_BF, sin_BF, position_B, table_BP]
  q_BNH = jax.ShapeDtypeStruct((batch, heads, head_dim), qkv.values.dtype)
  kernel = plgpu.kernel(
      tools.named(
          'rotate_and_append',
          _kernel,
          num_scales=len(qkv.scales),
          has_bias=qkv.bias_O is not None,
          interpret=interpret,
      ),
      out_type=q_BNH,
      grid=(batch,),
      grid_names=('slot',),
      **tools.kernel_options(interpret, barriers=False),
  )
  q, pools = tools.in_place(kernel, operands, (k_PKSH, values), q_BNH)
  return q, *pools
