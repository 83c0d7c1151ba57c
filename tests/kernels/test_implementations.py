"""Every implementation of every operation against the operation's reference.

On a CPU the kernels are interpreted; with --run-gpu they run as they are
compiled. Bits are compared where both add in one order, or where every order
gives one sum: of small integers on scales that are powers of two.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax import fp8, kernels
from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.compilation import exact_jit, on_gpu
from jetrl_jax.fp8 import DeferredScale, QTensor, Recipe, formats
from jetrl_jax.fp8.products import Rows
from jetrl_jax.fp8.quantization import quantize_groups
from jetrl_jax.kernels import (
    adamw,
    dispatch,
    kv_storage,
    log_sum_exp,
    quantize_transpose,
    rope_append,
    sample_token,
    swiglu,
)
from jetrl_jax.kernels.adamw.reference import fp8_codec
from jetrl_jax.kernels.add_norm_quantize import forward as add_norm_quantize
from jetrl_jax.kernels.attention import flash_attention
from jetrl_jax.kernels.block_scaled_dot import block_dot
from jetrl_jax.kernels.decode_attention import decode_attention
from jetrl_jax.kernels.gate_up import gate_up
from jetrl_jax.kernels.mlp import mlp
from jetrl_jax.kernels.requantize import requantize
from tests import kernels_in_use
from tests.hurry import fast_compile_jit

E4M3, E5M2 = formats.E4M3, formats.E5M2
_TILE = 64
_SCALING = dict(margin=0, power_of_two=True)


def _same(found, wanted) -> None:
  """Bit for bit."""
  for a, b in _leaves(found, wanted):
    assert np.array_equal(*(np.atleast_1d(x).view(np.uint8) for x in (a, b)))


def _near(rtol: float, atol: float = 0.0, share: float = 0.0):
  """All values within a bound, but for a share of them."""

  def compare(found, wanted) -> None:
    for a, b in _leaves(found, wanted):
      a, b = (np.asarray(x, np.float64) for x in (a, b))
      outside = np.abs(a - b) > rtol * np.abs(b) + atol
      assert np.mean(outside) <= share, np.max(np.abs(a - b))

  return compare


def _near_in_norm(bound: float):
  """The norm of the difference, beside the norm of what is wanted."""

  def compare(found, wanted) -> None:
    for a, b in _leaves(found, wanted):
      a, b = (np.asarray(x, np.float64) for x in (a, b))
      assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)

  return compare


def _each(*compares):
  """One comparison for each of the results."""

  def compare(found, wanted) -> None:
    for check, a, b in zip(compares, found, wanted, strict=True):
      check(a, b)

  return compare


def _leaves(found, wanted):
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  leaves = zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
  for a, b in leaves:
    assert a.dtype == b.dtype and a.shape == b.shape
    yield np.asarray(a), np.asarray(b)


@dataclasses.dataclass(frozen=True)
class Case:
  """An operation at some shapes and dtypes.

  Attributes:
    operation: of `dispatch.TABLE`.
    name: what is special.
    make: arguments of `run`.
    run: calls the operation.
    compare: of the results of an implementation and of the reference.
    beside: operations inside it that run their kernels on both sides.
  """

  operation: str
  name: str
  make: Callable[[], tuple]
  run: Callable[..., Any]
  compare: Callable[[Any, Any], None]
  beside: tuple[str, ...] = ()


def _normal(seed: int, *shape: int, dtype=jnp.bfloat16, spread: float = 0.0):
  random = np.random.default_rng(seed)
  values = random.standard_normal(shape)
  return jnp.asarray(
      values * np.exp(spread * random.standard_normal(shape)), dtype
  )


def _integers(seed: int, *shape: int, dtype=E4M3):
  random = np.random.default_rng(seed)
  return jnp.asarray(random.integers(-2, 3, shape)).astype(dtype)


def _powers(seed: int, *shape: int):
  random = np.random.default_rng(seed)
  return jnp.asarray(2.0 ** random.integers(-4, 5, shape), jnp.float32)


def _mask(rows: int):
  return jnp.asarray(np.arange(rows) % 7 != 0, jnp.float32)


def _norms() -> list[Case]:
  def make(dtype, added, step, dim=192):
    rows = 16
    product = DeferredScale(
        values=_normal(2, rows, dim, dtype=jnp.float32),
        scales=(jnp.float32(0.5), jnp.float32(0.25)),
    )
    return (
        3 * _normal(0, rows, dim, dtype=dtype),
        1 + _normal(1, dim, dtype=dtype) / 8,
        jnp.float32(2.0**-6) if step else None,
        product if added else None,
    )

  def run(x, gain, step, added, copies=1):
    return add_norm_quantize(x, gain, 1e-6, step, added, copies=copies)

  # Two orders of a float32 sum of 192 terms; in bfloat16 one rounding more may
  # fall the other way, and in E4M3 one step of eight.
  float32, bfloat16, low = _near(200 * 2.0**-24), _near(2.0**-7), _near(0.125)
  nothing = _same
  of = functools.partial(Case, 'add_norm_quantize')
  return [
      of(
          'float32',
          lambda: make(jnp.float32, False, False),
          run,
          _each(_same, float32, nothing),
      ),
      of(
          'bfloat16, quantised',
          lambda: make(jnp.bfloat16, False, True),
          run,
          _each(_same, bfloat16, low),
      ),
      of(
          'added, in copies',
          lambda: make(jnp.bfloat16, True, True),
          functools.partial(run, copies=2),
          _each(_same, nothing, low),
      ),
      of(
          'added, wide rows',
          lambda: make(jnp.bfloat16, True, False, dim=768),
          run,
          _each(_same, bfloat16, nothing),
      ),
  ]


def _adam() -> list[Case]:
  def make(dtype, at_random):
    codec, shape = fp8_codec(), (16, 256)
    master = _normal(0, *shape, dtype=dtype)
    gradient = _normal(1, *shape, dtype=dtype, spread=3.0)
    mu = codec.encode(_normal(2, *shape, dtype=jnp.float32, spread=2.0))
    nu = codec.encode(_normal(3, *shape, dtype=jnp.float32, spread=2.0) ** 2)
    numbers = jnp.asarray([1, 0.5, 1e-2, 2.0, 4.0, 0, 0, 0], jnp.float32)
    keys = jnp.asarray([3, 4, 5, 0], jnp.uint32) if at_random else None
    return master, gradient, mu, nu, numbers, keys

  def run(*args):
    master, mu, nu, amax = adamw.update(
        *args, b1=0.9, b2=0.99, eps=1e-8, decay=0.1
    )
    decode = fp8_codec().decode
    return master, decode(mu), decode(nu), amax

  # Float32 is off by a few of its last bits, and now and then that carries over
  # a rounding to 8 or 16 bits.
  compare = _near(1e-3, atol=1e-12, share=2e-3)
  return [
      Case(
          'adamw', name, functools.partial(make, dtype, at_random), run, compare
      )
      for name, dtype, at_random in (
          ('float32', jnp.float32, False),
          ('bfloat16 at random', jnp.bfloat16, True),
      )
  ]


def _attention() -> list[Case]:
  tokens, group, head_dim = 128, 2, 64

  def make():
    q, dout = (_normal(i, 1, 2, tokens * group, head_dim) for i in (0, 3))
    k, v = (_normal(i, 1, 2, tokens, head_dim) for i in (1, 2))
    # Two segments, the second from the second tile on; padding at the end.
    index = np.arange(tokens, dtype=np.int32)
    first = np.where(index < 64, 0, 64)
    last = np.where(index < 120, index, -1)
    spans = (np.repeat(x, group)[None].astype(np.int32) for x in (first, last))
    return q, k, v, dout, *spans

  def run(q, k, v, dout, first, last, kv_dtype):
    def attend(q, k, v):
      return flash_attention(q, k, v, first, last, group, _TILE, kv_dtype)

    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(dout)

  return [
      Case(
          'attention',
          f'{kind} keys, forward and backward',
          make,
          functools.partial(run, kv_dtype=kind),
          # Weights and results are rounded to bfloat16.
          _near_in_norm(2.0**-7),
      )
      for kind in (None, 'float8_e4m3fn')
  ]


def _decode_attention() -> list[Case]:
  def make(kind, step):
    slots, kv_heads, group, pages, size, head_dim = 4, 2, 3, 2, 64, 64
    pool = slots * pages, kv_heads, size, head_dim
    table = np.random.default_rng(0).permutation(slots * pages)
    return (
        _normal(0, slots, kv_heads * group, head_dim),
        kv_storage.store(_normal(1, *pool), kind),
        kv_storage.store_values(_normal(2, *pool), kind),
        jnp.asarray(table.reshape(slots, pages), jnp.int32),
        jnp.asarray([127, 40, 64, -1], jnp.int32),
        step,
    )

  def run(*args):
    *operands, step = args
    return decode_attention(*operands, _TILE, step)

  step = jnp.float32(2.0**-9)
  return [
      Case(
          'decode_attention',
          f'{kind} pages' + ', quantised' * (scale is not None),
          functools.partial(make, kind, scale),
          run,
          # As above; in E4M3 half a step is 2^-4.
          _near_in_norm(2.0**-7 if scale is None else 2.0**-5),
      )
      for kind, scale in (
          ('bfloat16', None),
          ('float8_e4m3fn', None),
          ('bfloat16', step),
      )
  ]


def _block_scaled_dots() -> list[Case]:
  def make(rows, blocks):
    columns, inner = 256, 256
    return (
        _integers(0, rows, inner),
        _powers(1, rows, inner // 128),
        _integers(2, columns, inner),
        _powers(3, columns // 128 if blocks else columns, inner // 128),
    )

  run = functools.partial(block_dot, out_dtype='float32', power_of_two=True)
  return [
      Case(
          'block_scaled_dot',
          f'{rows} rows, scales of {"blocks" if blocks else "rows"}',
          functools.partial(make, rows, blocks),
          run,
          _same,
      )
      for rows, blocks in ((16, True), (640, False))
  ]


def _gate_up() -> list[Case]:
  def make(rows):
    x8 = QTensor(values=_integers(0, rows, 256), scale=jnp.float32(0.125))
    weight = QTensor(values=_integers(1, 128, 256), scale=jnp.float32(0.0625))
    return x8, weight, jnp.float32(2.0**-5)

  return [
      Case(
          'gate_up',
          f'{rows} rows',
          functools.partial(make, rows),
          functools.partial(gate_up, dtype=jnp.bfloat16),
          _same,
          beside=('swiglu',),
      )
      for rows in (64, 128)
  ]


def _log_sum_exp() -> list[Case]:
  def make(vocab):
    logits = 10 * _normal(0, 16, vocab, dtype=jnp.float32)
    cotangents = _normal(1, 2, 16, dtype=jnp.float32)
    return logits, jnp.full((16,), 0.5), cotangents

  def run(logits, inverse, cotangents):
    stats, pull = jax.vjp(lambda z: log_sum_exp.row_stats(z, inverse), logits)
    return stats, pull(tuple(cotangents))

  # A GPU's dots have a last bit or two of their own. A gradient is a logit less
  # the row's mean, which may be near zero.
  stats, gradient = _near(1e-5, atol=1e-4), _near_in_norm(3e-5)
  return [
      Case(
          'log_sum_exp',
          f'{vocab} tokens',
          functools.partial(make, vocab),
          run,
          _each(stats, gradient),
      )
      for vocab in (50, 5000)  # Two chunks.
  ]


def _mlps() -> list[Case]:
  rows, dim, inner = 128, 128, 256
  recipe = Recipe()

  def make():
    params = {
        'gate_up': {'kernel': _normal(0, 2 * inner, dim, dtype='float32') / 8},
        'down': {'kernel': _normal(1, dim, inner, dtype='float32') / 8},
    }
    state = fp8.init_state(params, recipe)
    for slot in state.values():
      slot['input']['scale'] = jnp.float32(2.0**-5)
      slot['output_grad']['scale'] = jnp.float32(2.0**-5)
    state = fp8.observe_kernels(state, params, recipe, Axes())
    weights = kernels.prepare_weights(params, state, recipe)
    mask = _mask(rows)
    dz = _normal(3, rows, dim) * mask[:, None].astype('bfloat16')
    return _normal(2, rows, dim), params, weights, state, mask, dz

  def run(x, params, weights, state, mask, dz):
    def forward(x, params):
      gate_up, down = (
          (params[name]['kernel'], weights[name]['kernel'], state[name])
          for name in ('gate_up', 'down')
      )
      return mlp(recipe, Rows(x), gate_up, down, mask)

    z, pull = jax.vjp(forward, x, params)
    return z, pull(dz)

  return [
      Case(
          'mlp',
          'forward and backward',
          make,
          run,
          # Between the dots a gradient's exp2 is not exp: another float32
          # beside a tie becomes another of the 8-bit values.
          _each(_same, _near_in_norm(2.0**-7)),
          beside=('quantize_transpose', 'swiglu'),
      )
  ]


def _transposes() -> list[Case]:
  def matrix(rows, columns):
    return _normal(0, rows, columns, spread=3.0), _mask(rows)

  def per_tensor(x, mask, dtype):
    found = quantize_transpose.quantize_and_transpose(
        x, jnp.float32(0.25), mask, dtype, row_major=True
    )
    return (
        (found.row_major_MN, found.transposed_NM, found.amax),
        found.quantization_error,
    )

  def per_block(x, mask, dtype):
    x = jnp.where(mask[:, None] > 0, x, 0)
    *values, seen = quantize_transpose.quantize_both_ways(
        x, mask, dtype, **_SCALING
    )
    return values, seen

  def regrouped(x, mask):
    x8 = quantize_groups(x, E4M3, (1, 128), **_SCALING)
    return quantize_transpose.regroup_and_transpose(x8, x.dtype, **_SCALING)

  of = functools.partial(Case, 'quantize_transpose')
  # Sums in another order.
  compare = _each(_same, _near(1e-4))
  make = functools.partial(matrix, 256, 384)
  return [
      *(
          of(
              f'{name}, {jnp.dtype(dtype).name}',
              make,
              functools.partial(run, dtype=dtype),
              compare,
          )
          for name, run in (
              ('per tensor', per_tensor),
              ('per block', per_block),
          )
          for dtype in (E4M3, E5M2)
      ),
      of('regrouped', make, regrouped, _same),
      of(
          'bytes',
          lambda: (_integers(0, 256, 128),),
          quantize_transpose.transpose,
          _same,
      ),
  ]


def _requantized() -> list[Case]:
  recipe = Recipe()

  def make(dtype):
    before = {
        'out': {'kernel': _normal(0, 64, 256, dtype=dtype, spread=2.0)},
        'norm': _normal(1, 128, dtype=dtype),
    }
    moved = jax.tree.map(lambda x: x.at[::2].multiply(3.0), before)
    state = fp8.init_state(before, recipe)
    state = fp8.observe_kernels(state, before, recipe, Axes())
    return moved, state, kernels.prepare_weights(before, state, recipe)

  def run(*trees):
    return requantize(*trees, recipe, Axes())

  return [
      Case(
          'requantize',
          dtype,
          functools.partial(make, dtype),
          run,
          _each(_same, _near(1e-4), _near(1e-6)),
      )
      for dtype in ('float32', 'bfloat16')
  ]


def _rope_appends() -> list[Case]:
  slots, head_dim, pages, size = 16, 64, 2, 32

  def make(kind, scales, has_bias, heads, kv_heads):
    random = np.random.default_rng(0)
    width = (heads + 2 * kv_heads) * head_dim
    qkv = DeferredScale(
        values=8 * _normal(0, slots, width),
        scales=tuple(map(jnp.float32, scales)),
        bias_O=_normal(1, width) if has_bias else None,
    )
    pool = slots * pages, kv_heads, size, head_dim
    cache = (
        kv_storage.store(_normal(2, *pool), kind),
        kv_storage.store_values(_normal(3, *pool), kind),
    )
    position = random.integers(0, pages * size, slots).astype(np.int32)
    position[:4] = 0, size, 2 * size - 1, -1  # Slot 3 is idle.
    table = random.permutation(slots * pages).reshape(slots, pages)
    angle = random.uniform(0, 99, (slots, head_dim // 2)).astype(np.float32)
    return qkv, angle, position, table.astype(np.int32), cache

  def run(qkv, angle, position, table, cache):
    rotation = jnp.cos(angle), jnp.sin(angle)
    return rope_append.rope_append(qkv, rotation, position, table, cache)

  return [
      Case(
          'rope_append',
          f'{kind}, {len(scales)} scales'
          + ', bias' * has_bias
          + f', {heads} heads on {kv_heads}',
          functools.partial(make, kind, scales, has_bias, heads, kv_heads),
          run,
          _same,
      )
      # Warps share heads as the numbers of queries' and of keys' allow it.
      for kind, scales, has_bias, heads, kv_heads in (
          ('bfloat16', (), False, 6, 2),
          ('bfloat16', (2.0**-3, 0.5), True, 2, 1),
          ('float8_e4m3fn', (2.0**-3, 0.5), True, 12, 2),
          ('float8_e4m3fn', (), True, 4, 1),
      )
  ]


def _sampled() -> list[Case]:
  """The noise is an implementation's own: draws that it does not decide."""
  rows, vocab = 16, 5000

  def certain():
    tokens = np.random.default_rng(0).integers(0, vocab, rows)
    logits = jnp.full((rows, vocab), -300.0)
    return logits.at[np.arange(rows), tokens].set(300.0)

  def run(logits, greedy):
    keys = jax.random.split(jax.random.key(0), rows)
    tokens, _ = sample_token.draw(
        logits,
        jnp.full((rows,), 0.5),
        None,
        keys,
        greedy_B=jnp.full((rows,), greedy),
    )
    return tokens

  return [
      Case(
          'sample_token',
          'greedy',
          lambda: (_normal(0, rows, vocab, dtype=jnp.float32),),
          functools.partial(run, greedy=True),
          _same,
      ),
      Case(
          'sample_token',
          'certain',
          lambda: (certain(),),
          functools.partial(run, greedy=False),
          _same,
      ),
  ]


def _swiglus() -> list[Case]:
  rows, columns = 128, 192

  def one(y, dh):
    h, pull = jax.vjp(swiglu.swiglu, y)
    return h, pull(dh)

  def quantised(values, step):
    product = DeferredScale(
        values=values, scales=(jnp.float32(0.5), jnp.float32(0.25))
    )
    return swiglu.swiglu_of(product, step)

  of = functools.partial(Case, 'swiglu')
  # exp2 of a multiple is not exp: beside a tie the other of two values.
  low = _near(0.125, share=2e-3)
  step = jnp.float32(2.0**-6)
  return [
      of(
          'with its derivative',
          lambda: (
              4 * _normal(0, rows, 2 * columns),
              _normal(1, rows, columns),
          ),
          one,
          _each(_near(2.0**-7), _same),
      ),
      of(
          'quantised',
          lambda: (16 * _normal(0, rows, 2 * columns), step),
          quantised,
          low,
      ),
      of(
          'quantised, of two parts',
          lambda: (16 * _normal(0, 2, rows, columns), step),
          quantised,
          low,
      ),
  ]


CASES = [
    *_norms(),
    *_adam(),
    *_attention(),
    *_decode_attention(),
    *_block_scaled_dots(),
    *_gate_up(),
    *_log_sum_exp(),
    *_mlps(),
    *_transposes(),
    *_requantized(),
    *_rope_appends(),
    *_sampled(),
    *_swiglus(),
]
# Interpreted, these take seconds each; tests/kernels/test_<operation>.py has
# their kernels interpreted too.
_SLOW = (
    'adamw',
    'attention',
    'decode_attention',
    'mlp',
    'quantize_transpose',
    'requantize',
    'sample_token',
)


def _pairs(slow: tuple[str, ...] = ()) -> list:
  """Each case with each implementation; `slow` are operations."""

  def marks(operation: str, name: str) -> list:
    found = [pytest.mark.slow] if operation in slow else []
    mosaic = name.startswith('mosaic')
    return [*found, kernels_in_use.needs_mosaic] if mosaic else found

  return [
      pytest.param(
          case,
          name,
          id=f'{case.operation} {name}: {case.name}',
          marks=marks(case.operation, name),
      )
      for case in CASES
      for name in dispatch.TABLE[case.operation]
      if name != dispatch.REFERENCE
  ]


def test_every_operation_with_an_implementation_has_a_case():
  # That kernel needs several devices: tests/models/test_gathers.py.
  tested = {case.operation for case in CASES} | {'gather_columns'}
  assert tested == {
      operation for operation, names in dispatch.TABLE.items() if names[1:]
  }


def _result(case: Case, table: dispatch.Kernels) -> tuple[str, Any]:
  """Returns (the program that was traced, its results)."""

  def run(*args):
    with kernels_in_use.run(table):
      return case.run(*args)

  args = case.make()
  jit = exact_jit if on_gpu() else fast_compile_jit
  traced = jit(run).trace(*args)
  return str(traced.jaxpr), traced.lower().compile()(*args)


def _check(case: Case, name: str) -> None:
  reference = kernels_in_use.choose(*case.beside)
  table = reference.replace(**{case.operation: name})
  (program, found), (plain, wanted) = (
      _result(case, kernels) for kernels in (table, reference)
  )
  # Or the shapes do not fit, and the reference was compared with itself.
  assert program != plain
  case.compare(found, wanted)


@pytest.mark.parametrize('case, name', _pairs(_SLOW))
def test_an_implementation_computes_what_its_reference_does(case, name):
  if on_gpu():
    pytest.skip('the next test has them compiled')
  _check(case, name)


@pytest.mark.parametrize('case, name', _pairs())
def test_an_implementation_is_lowered_for_a_gpu(monkeypatch, case, name):
  args = case.make()
  kernels_in_use.as_on_hopper(monkeypatch)
  kernels = kernels_in_use.choose(*case.beside, case.operation)
  assert kernels.of(case.operation) == name

  def hashes(*more: int) -> list[str]:
    with dispatch.using(kernels):
      traced = jax.jit(lambda *args: (case.run(*args), *more)).trace(*args)
    text = traced.lower(lowering_platforms=('cuda',)).as_text()
    return re.findall(r'kernel_hash = "([^"]*)"', text)

  # Mosaic finds layouts here; interpreted, a kernel has none.
  found = hashes()
  assert found
  # Another program's kernel has no other number, so it is compiled once.
  assert hashes(1) == found


@pytest.mark.gpu
@pytest.mark.parametrize('case, name', _pairs())
def test_compiled_it_computes_what_its_reference_does(case, name):
  try:
    dispatch.select(f'{case.operation}={name}')
  except ValueError as error:
    pytest.skip(str(error))
  _check(case, name)
