"""Gradients of attention for Hopper GPUs (Mosaic).

    p = 2^(q k^T scale - lse),  ds = p (dout v^T - delta),  delta = out . dout
    dq = ds k / sqrt(H),    dk = ds^T q / sqrt(H),    dv = p^T dout

There are two kernels without atomics, so gradients repeat to the bit. In the
first, each of a program's two computing warpgroups has 64 query rows and goes
through tiles of 64 keys and values. In the second, each has 64 keys and goes
through tiles of 64 rows of q and dout; a program has one of them where the
number of key tiles is odd. One more warpgroup asks for the tiles, `_STAGES`
ahead. XLA makes delta.

In shared memory is what a program owns, and the tiles. With rows come their
lse, delta, and first and last key. Products [64, 64] and gradients [64, H] are
float32 in registers. p and ds are rounded to the dtype of q before they are
multiplied.

Order of a sum: the tensor core adds 16 numbers at a time, and tiles follow in
ascending order. No log-prob depends on it.

Lower bound of the time: the tensor core takes 770 cycles in the first kernel
and 1020 in the second, for 64 x 64 rows and keys with 128 channels, and half of
that with 64. One warpgroup computes while the other one multiplies.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels import mosaic_tools as tools
from jetrl_jax.kernels.attention.layout import pad_rows, row_tiles_of
from jetrl_jax.kernels.attention.mosaic_sm90 import key_tiles_of
from jetrl_jax.kernels.attention.reference import softmax_scale
from jetrl_jax.kernels.calls import lowered_once

# Rows of a product, and keys: as many as `layout.TILE`.
_ROWS = tools.ROWS
_GROUPS = 2
_STAGES = 3
# Fewer than elsewhere: the sums of keys and values leave no more.
_MEMORY_REGISTERS = 24
_LAYOUT = plgpu.Layout.WGMMA


def _along(ref, axis: int):
  """Returns a vector [64] as every row (axis 1) or column (0) of a product."""
  vector = tools.loaded(ref, 1 - axis)
  return lax.broadcast_in_dim(vector, (_ROWS, _ROWS), [axis])


def _weights(products, lse_ref, span_refs, first_key, rows_axis, head_dim):
  """Returns p of a tile, 0 where a row does not see a key.

  Args:
    products: the products of queries and keys.
    lse_ref: the log-sum-exps of the rows.
    span_refs: first and last key that each row may see; None where all see all.
    first_key: number of the tile's first key.
    rows_axis: 0 where rows come first, 1 where keys do.
    head_dim: channels.
  """
  scores = products * softmax_scale(head_dim)
  p = tools.power_of_2(scores - _along(lse_ref, rows_axis))
  if span_refs is None:
    return p
  key = first_key + plgpu.broadcasted_iota(
      jnp.int32, p.shape, 1 - rows_axis, layout=_LAYOUT
  )
  first, last = (_along(ref, rows_axis) for ref in span_refs)
  return jnp.where((key >= first) & (key <= last), p, 0.0)


def _products(pairs, of_products):
  """Multiplies two pairs of tiles [64, H], and returns of both products.

  Args:
    pairs: (a, b) of each product a b^T.
    of_products: what is wanted of the first, and of it and the second; the
      second is multiplied meanwhile.
  """

  def run(*sums):
    for total, (a, b) in zip(sums, pairs, strict=True):
      plgpu.wgmma(total, a, b.transpose((1, 0)))
    first = of_products[0](plgpu.wgmma_accumulator_load(sums[0], wait_n=1))
    second = plgpu.wgmma_accumulator_load(sums[1])
    return first, of_products[1](first, second)

  return pl.run_scoped(run, *[tools.sums(_ROWS, _ROWS)] * 2)


def _added(totals, products, interpret: bool):
  """Returns totals [64, H], each with a product of weights and a tile added.

  Args:
    totals: so far.
    products: (weights [64, 64], tile [64, H]) for each.
    interpret: the kernel runs on a CPU.
  """
  if interpret:  # The interpreter has no product of operands in registers.
    totals = [
        total + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        for total, (a, b) in zip(totals, products, strict=True)
    ]
    tools.has_read()
    return totals

  def add(refs):
    for ref, (a, b) in zip(refs, products, strict=True):
      plgpu.wgmma(ref, a, b)

  return pl.run_state(add)(
      [plgpu.WGMMAAccumulatorRef.init(total) for total in totals]
  )


def _zeros(columns: int):
  return plgpu.layout_cast(jnp.zeros((_ROWS, columns), jnp.float32), _LAYOUT)


def _through(bounds, step, carry):
  """Runs `step(i, carry, is_masked)` from bounds[0] on, masked at both ends."""
  for n, is_masked in enumerate((True, False, True)):
    body = functools.partial(step, is_masked=is_masked)
    carry = lax.fori_loop(bounds[n], bounds[n + 1], body, carry)
  return carry


class _Scratch(NamedTuple):
  """A program's arrays in shared memory.

  Attributes:
    own: of each warpgroup: what it multiplies with all tiles; at the end its
      results, in place of the first of them.
    barrier: that has come.
    stream: the tiles.
  """

  own: dict[str, Any]
  barrier: Any
  stream: tools.Stream


def _matrix(count: int, head_dim: int, dtype):
  return plgpu.SMEM(
      (count, _ROWS, head_dim),
      dtype,
      transforms=tools.pieces(dtype),
  )


def _vector(count: int, dtype):
  return plgpu.SMEM((count, _ROWS), dtype)


def _scratch(own, tiles, groups: int, head_dim: int, dtype):
  """Returns the arrays to allocate.

  Args:
    own: name -> dtype of a vector, or None for a matrix of `dtype`.
    tiles: as own.
    groups: warpgroups that multiply.
    head_dim: channels.
    dtype: the dtype of the matrices.
  """

  def make(count: int, of_name):
    return {
        name: _vector(count, kind) if kind else _matrix(count, head_dim, dtype)
        for name, kind in of_name.items()
    }

  return _Scratch(
      own=make(groups, own),
      barrier=plgpu.Barrier(num_arrivals=len(own), num_barriers=groups),
      stream=tools.Stream.types(_STAGES, groups, **make(_STAGES, tiles)),
  )


_OF_ROWS = {
    'q': None,
    'dout': None,
    'first': jnp.int32,
    'last': jnp.int32,
    'lse': jnp.float32,
    'delta': jnp.float32,
}
_OF_KEYS = {'k': None, 'v': None}


def _kernel(refs, bounds_ref, *rest, multiply, own, groups, interpret):
  """Runs a program: a warpgroup asks for tiles, the others multiply.

  Args:
    refs: name -> operand, see `_OF_ROWS` and `_OF_KEYS`.
    bounds_ref: [B, programs, 4], see `_through`.
    *rest: results, and the `_Scratch`.
    multiply: makes the results of a warpgroup.
    own: names of what it owns; the others come as tiles.
    groups: warpgroups that multiply.
    interpret: run on a CPU.
  """
  *out_refs, scratch = rest
  batch, head, place = map(lax.axis_index, ('batch', 'head', 'place'))
  group = lax.axis_index('warpgroup')
  bounds = [bounds_ref[batch, place, i] for i in range(4)]

  def at(name: str, i):
    lead = (batch,) if name in ('first', 'last') else (batch, head)
    start = pl.multiple_of(i * _ROWS, _ROWS)
    return refs[name].at[(*lead, pl.ds(start, _ROWS))]

  @pl.when(group == groups)
  def _():
    names = scratch.stream.tiles
    stream = scratch.stream, lambda i: {name: at(name, i) for name in names}
    tools.ask(
        bounds[0],
        bounds[3],
        _STAGES,
        [stream],
        _MEMORY_REGISTERS,
        interpret=interpret,
    )

  @pl.when(group < groups)
  def _():
    tools.take_registers(groups, _MEMORY_REGISTERS)
    number = place * groups + group
    barrier = scratch.barrier.at[group]
    mine = {name: ref.at[group] for name, ref in scratch.own.items()}
    for name in own:
      plgpu.copy_gmem_to_smem(at(name, number), mine[name], barrier)
    plgpu.barrier_wait(barrier)

    def with_tile(i, run):
      slot = lax.rem(i - bounds[0], jnp.int32(_STAGES))
      plgpu.barrier_wait(scratch.stream.there.at[slot])
      result = run({n: t.at[slot] for n, t in scratch.stream.tiles.items()})
      if 'lse' in scratch.stream.tiles:
        tools.has_read()
      plgpu.barrier_arrive(scratch.stream.used.at[slot])
      return result

    results = multiply(number, bounds, mine, with_tile)
    staged = [mine[name] for name in own][: len(results)]
    for result, ref in zip(results, staged, strict=True):
      ref[...] = result.astype(ref.dtype)
    plgpu.commit_smem()
    rows = pl.ds(pl.multiple_of(number * _ROWS, _ROWS), _ROWS)
    for ref, out_ref in zip(staged, out_refs, strict=True):
      plgpu.copy_smem_to_gmem(ref, out_ref.at[batch, head, rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _dq(number, bounds, mine, with_tile, *, head_dim, interpret):
  """Returns the gradient of a warpgroup's rows."""
  del number
  dtype = mine['q'].dtype

  def step(i, carry, is_masked: bool):

    def run(tile):
      span = (mine['first'], mine['last']) if is_masked else None

      def weights(products):
        return _weights(products, mine['lse'], span, i * _ROWS, 0, head_dim)

      def ds_of(p, dp):
        return (p * (dp - _along(mine['delta'], 0))).astype(dtype)

      pairs = (mine['q'], tile['k']), (mine['dout'], tile['v'])
      _, ds = _products(pairs, (weights, ds_of))
      return _added(carry, [(ds, tile['k'])], interpret)

    return with_tile(i, run)

  [dq] = _through(bounds, step, [_zeros(head_dim)])
  return [dq * head_dim**-0.5]


def _dkv(number, bounds, mine, with_tile, *, head_dim, interpret):
  """Returns the gradients of a warpgroup's keys and values."""
  dtype = mine['k'].dtype

  def step(i, carry, is_masked: bool):

    def run(tile):
      span = (tile['first'], tile['last']) if is_masked else None

      def weights(products):
        first_key = number * _ROWS
        return _weights(products, tile['lse'], span, first_key, 1, head_dim)

      def both(p, dp):
        return p.astype(dtype), (p * (dp - _along(tile['delta'], 1))).astype(
            dtype
        )

      pairs = (mine['k'], tile['q']), (mine['v'], tile['dout'])
      _, (p, ds) = _products(pairs, (weights, both))
      return _added(carry, [(ds, tile['q']), (p, tile['dout'])], interpret)

    return with_tile(i, run)

  dk, dv = _through(bounds, step, [_zeros(head_dim), _zeros(head_dim)])
  return [dk * head_dim**-0.5, dv]


def _call(
    name: str, multiply, own, tiles, refs, bounds, like, groups: int, interpret
):
  """Runs a kernel over all rows or keys, and returns its results.

  Args:
    name: in profiles.
    multiply: see `_kernel`.
    own: see `_scratch`.
    tiles: as own.
    refs: operands by name.
    bounds: see `_through`.
    like: shapes of the results [B, K, length, H].
    groups: warpgroups that multiply.
    interpret: run on a CPU.
  """
  batch, kv_heads, length, head_dim = like[0].shape
  multiply = functools.partial(multiply, head_dim=head_dim, interpret=interpret)
  return plgpu.kernel(
      tools.named(
          name,
          _kernel,
          multiply=multiply,
          own=own,
          groups=groups,
          interpret=interpret,
      ),
      out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
      scratch_types=[_scratch(own, tiles, groups, head_dim, like[0].dtype)],
      grid=(batch, kv_heads, length // (groups * _ROWS)),
      grid_names=('batch', 'head', 'place'),
      num_threads=groups + 1,
      thread_name='warpgroup',
      **tools.kernel_options(interpret),
  )(refs, bounds)


@lowered_once('interpret')
def backward(
    q_BKRH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    first_BR: Array,
    last_BR: Array,
    out_BKRH: Array,
    lse_BKR: Array,
    dout_BKRH: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
  """Returns (dq, dk, dv) in the dtype of q, k and v.

  Arguments are those of `mosaic_sm90.forward`, its two results and the
  cotangent of the first.
  """
  wanted, height = q_BKRH.shape[2], _GROUPS * _ROWS
  q_BKRH, out_BKRH, dout_BKRH, lse_BKR = (
      pad_rows(x, 2, height) for x in (q_BKRH, out_BKRH, dout_BKRH, lse_BKR)
  )
  first_BR = pad_rows(first_BR, 1, height)
  last_BR = pad_rows(last_BR, 1, height, fill=-1)
  delta = jnp.sum(
      out_BKRH.astype(jnp.float32) * dout_BKRH.astype(jnp.float32), axis=-1
  )
  refs = {
      'q': q_BKRH,
      'dout': dout_BKRH,
      'first': first_BR,
      'last': last_BR,
      'lse': lse_BKR,
      'delta': delta,
      'k': k_BKSH,
      'v': v_BKSH,
  }
  [dq] = _call(
      'flash_attention_dq',
      _dq,
      _OF_ROWS,
      _OF_KEYS,
      refs,
      key_tiles_of(first_BR, last_BR, height),
      [q_BKRH],
      _GROUPS,
      interpret,
  )
  length = k_BKSH.shape[2]
  groups = _GROUPS if length % height == 0 else 1
  keys = groups * _ROWS
  dk, dv = _call(
      'flash_attention_dkv',
      _dkv,
      _OF_KEYS,
      _OF_ROWS,
      refs,
      row_tiles_of(first_BR, last_BR, length // keys, keys, _ROWS),
      [k_BKSH, v_BKSH],
      groups,
      interpret,
  )
  return dq[:, :, :wanted], dk, dv
