"""Times what a decode step's dots could be: forms, and who chooses their tiles.

    python -m benchmarks.gemm_forms --output=benchmarks/results/NAME

For each projection and few rows M: the dot as it is, with its algorithm chosen
by timing (Triton among them or not), with a float32 result, with the result
turned round, with its columns or its contraction in parts of a batch; gate_up
also with SwiGLU behind it, as two kernels and, where it fits, as one. FP8 dots
on Hopper also in Pallas' other form for GPUs (`mosaic_dots.py`). And for
many rows what a contraction in two parts would cost training. Beside it,
whether the bits are those of many rows, and what the largest kernel itself
takes: a dot of few rows in the loop waits for the host.
"""

import functools

import jax
import jax.numpy as jnp
from absl import flags
from jax import lax

from benchmarks import common, mosaic_dots
from jetrl_jax.compilation import compiler_options, on_gpu, on_hopper
from jetrl_jax.config_model import SHAPES
from jetrl_jax.fp8 import formats, gate_up_kernel, swiglu
from jetrl_jax.fp8.products import BATCHED_NT, NT, Unscaled
from jetrl_jax.fp8.quantization import QTensor

_SHAPE = flags.DEFINE_enum(
    'shape', 'qwen2.5-7b', sorted(SHAPES), 'See model.shape.'
)
_ROWS = flags.DEFINE_list('rows', ['64', '128', '256'], 'M of decode.')
_NAMES = ('qkv', 'o', 'gate_up', 'down')
_PROJECTIONS = flags.DEFINE_list('projections', list(_NAMES), 'Which dots.')
_FORMS = flags.DEFINE_multi_enum(
    'form',
    [],
    [
        *('as it is', 'float32 result', 'turned round'),
        *(f'columns in {parts}' for parts in (2, 4, 8)),
        *('contraction in 2', 'and SwiGLU', 'and SwiGLU as one'),
        *('chosen by timing', 'the same, Triton too'),
        *('Mosaic', 'and SwiGLU by Mosaic'),
    ],
    'Which of them, may be repeated; none for all.',
)
_DTYPES = flags.DEFINE_list('dtypes', ['float8_e4m3fn', 'bfloat16'], 'Of them.')
_MANY = flags.DEFINE_integer('many', 8192, 'M to compare bits with.')
# Weights that are read in turn, so that none waits in the L2 cache.
_WEIGHTS_BYTES = 4e8
_LOOPS = 20
# Scales of x, of the weight and of h, where there are any.
_SCALES = 2.0**-3, 2.0**-2, 2.0**-1
_COLUMNS = (
    ('projection', 'projection', ''),
    ('dtype', 'dtype', ''),
    ('rows', 'M', 'd'),
    ('form', 'form', ''),
    ('us', 'us', '.1f'),
    ('kernel_us', 'its kernel us', '.1f'),
    ('kernel', 'kernel', ''),
    ('equal', 'equal to many rows', ''),
)


def one(dtype):
  """Returns the dot with a result of `dtype`."""
  return lambda x, w: lax.dot_general(x, w, NT, preferred_element_type=dtype)


def turned(x, w):
  """Returns the dot with its result turned round, [O, M]."""
  return lax.dot_general(w, x, NT, preferred_element_type=jnp.bfloat16)


def columns(parts: int):
  """Returns the dot whose columns are parts of a batch, [parts, M, O]."""

  def run(x, w):
    x = jnp.broadcast_to(x[None], (parts, *x.shape))
    w = w.reshape(parts, -1, w.shape[1])
    return lax.dot_general(
        x, w, BATCHED_NT, preferred_element_type=jnp.bfloat16
    )

  return run


def contraction(parts: int):
  """Returns the dot whose contraction is in parts of a batch, and added."""

  def run(x, w):
    x, w = (a.reshape(a.shape[0], parts, -1) for a in (x, w))
    y = lax.dot_general(
        x, w, (((2,), (2,)), ((1,), (1,))), preferred_element_type=jnp.float32
    )
    return sum(y[1:], y[0]).astype(jnp.bfloat16)

  return run


def with_swiglu(as_one: bool):
  """Returns gate_up and SwiGLU, on scales of FP8; few rows perhaps `as_one`."""

  def run(x, w):
    is_fp8, how = x.dtype.itemsize == 1, {'interpret': not on_gpu()}
    scales = [jnp.float32(scale) for scale in _SCALES]
    if as_one and len(x) in gate_up_kernel.ROWS:  # Not the many beside them.
      x8, w8 = (
          QTensor(values=values, scale=scale)
          for values, scale in zip((x, w), scales[:2], strict=True)
      )
      return gate_up_kernel.hidden(x8, w8, scales[2], **how).values
    product = Unscaled(
        values=columns(2)(x, w), scales=tuple(scales[:2]) if is_fp8 else ()
    )
    return swiglu.swiglu_of(product, scales[2] if is_fp8 else None, **how)

  return run


def by_mosaic(program: mosaic_dots.Program):
  """Returns the dot as a kernel of Pallas' Mosaic form."""

  def run(x, w):
    out = mosaic_dots.dots(x, w[None], program, lambda y: y, jnp.float32)
    return out.astype(jnp.bfloat16)

  return run


def with_swiglu_by_mosaic(program: mosaic_dots.Program):
  """Returns gate_up and SwiGLU as such a kernel."""
  finish = functools.partial(
      mosaic_dots.swiglu, scales=_SCALES[:2], step=_SCALES[2]
  )

  def run(x, w):
    w = w.reshape(2, -1, w.shape[1])
    return mosaic_dots.dots(x, w, program, finish, formats.E4M3)

  return run


def forms(name: str, rows: int, size: tuple[int, int], dtype) -> dict:
  """Returns name -> (function, compiler options) of those asked for."""
  pinned = compiler_options()
  found = {
      'as it is': (one(jnp.bfloat16), pinned),
      'float32 result': (one(jnp.float32), pinned),
      'turned round': (turned, pinned),
  }
  for parts in (2,) if name == 'qkv' else (2, 4, 8):
    found[f'columns in {parts}'] = (columns(parts), pinned)
  if name == 'gate_up':
    found['and SwiGLU'] = (with_swiglu(as_one=False), pinned)
    dims = size[0], size[1] // 2
    if dtype.itemsize == 1 and gate_up_kernel.fits(rows, dims):
      found['and SwiGLU as one'] = (with_swiglu(as_one=True), pinned)
  program = mosaic_dots.PROGRAMS[name].get(rows)
  if program and dtype.itemsize == 1 and on_hopper():
    if name == 'gate_up':
      run = with_swiglu_by_mosaic(program)
      found['and SwiGLU by Mosaic'] = (run, pinned)
    else:
      found['Mosaic'] = (by_mosaic(program), pinned)
  if name in ('o', 'down'):
    found['contraction in 2'] = (contraction(2), pinned)
  if jax.default_backend() != 'cpu':
    chosen = pinned | {'xla_gpu_autotune_level': 4}
    triton = chosen | {'xla_gpu_enable_triton_gemm': True}
    found['chosen by timing'] = (one(jnp.bfloat16), chosen)
    found['the same, Triton too'] = (one(jnp.bfloat16), triton)
  wanted = _FORMS.value or found
  return {form: run for form, run in found.items() if form in wanted}


def _joined(y, rows: int):
  """Returns the result of a dot [M, O], also of one in parts or turned."""
  y = y if y.ndim == 2 else jnp.concatenate([*y], axis=1)
  return y if y.shape[0] == rows else y.T


def timed(run, options, x_2MI, weights) -> dict:
  """Returns the time of one dot in a loop, and what its kernel took of it."""

  def body(i, carry, x_2MI, weights):
    del carry
    x = lax.dynamic_index_in_dim(x_2MI, i % 2, keepdims=False)
    return [run(x, w) for w in weights]

  @functools.partial(jax.jit, compiler_options=options)
  def loop(x_2MI, weights):
    start = [jnp.zeros_like(run(x_2MI[0], w)) for w in weights]
    step = functools.partial(body, x_2MI=x_2MI, weights=weights)
    return lax.fori_loop(0, _LOOPS, step, start)

  spent = common.median_seconds(lambda: loop(x_2MI, weights))
  found = {'us': spent / _LOOPS / len(weights) * 1e6}
  kernels = common.kernel_times(lambda: loop(x_2MI, weights))
  if kernels:
    name, (ms, count) = max(kernels.items(), key=lambda item: item[1][0])
    found |= {'kernel_us': ms / count * 1e3, 'kernel': name}
  return found


def measure(name: str, size: tuple[int, int], dtype) -> list[dict]:
  """Returns a row per number of rows and form."""
  in_dim, out_dim = size
  count = max(1, round(_WEIGHTS_BYTES / in_dim / out_dim / dtype.itemsize))
  count = 1 if common.TINY.value else count

  @functools.partial(jax.jit, static_argnums=1)
  def draw(key, shape):
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)

  weights = [draw(jax.random.key(i), (out_dim, in_dim)) for i in range(count)]
  many, found = draw(jax.random.key(count), (_MANY.value, in_dim)), []
  for rows in map(int, _ROWS.value):
    x_2MI = jnp.stack([many[:rows], many[-rows:]])
    for form, (run, options) in forms(name, rows, size, dtype).items():
      compiled = jax.jit(run, compiler_options=options)
      # What timing chooses for few rows is compared with the pinned choice.
      whole = jax.jit(run, compiler_options=compiler_options())
      few, wanted = (
          _joined(call(x, weights[0]), len(x))
          for call, x in ((compiled, many[:rows]), (whole, many))
      )
      found.append(
          {
              'projection': name,
              'dtype': dtype.name,
              'rows': rows,
              'form': form,
              'equal': str(bool(jnp.all(few == wanted[:rows]))),
          }
          | timed(run, options, x_2MI, weights)
      )
  if name == 'down' and not _FORMS.value:
    x_2MI = jnp.stack([many, many[::-1]])
    for form in ('as it is', 'contraction in 2'):
      run, options = forms(name, _MANY.value, size, dtype)[form]
      found.append(
          {
              'projection': name,
              'dtype': dtype.name,
              'rows': _MANY.value,
              'form': form,
              'equal': '',
          }
          | timed(run, options, x_2MI, weights[:2])
      )
  return found


def main(argv: list[str]) -> None:
  """Measures the projections that are asked for, in their dtypes."""
  del argv
  rows = []
  for dtype in map(jnp.dtype, _DTYPES.value):
    for name, size in common.projections(SHAPES[_SHAPE.value]).items():
      if name not in _PROJECTIONS.value:
        continue
      if common.TINY.value:
        size = (256, 512)
      rows += measure(name, size, dtype)
      common.write(rows, {}, common.table(rows, _COLUMNS))


flags.register_validator(
    _PROJECTIONS,
    lambda names: set(names) <= set(_NAMES),
    message=f'must be some of {", ".join(_NAMES)}',
)

if __name__ == '__main__':
  common.run(main)
