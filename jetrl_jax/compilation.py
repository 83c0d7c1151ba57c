"""The one place that compiles, with the options that exactness rests on.

The building blocks are plain functions; `exact_jit` is applied at the outermost
boundary only (a jit with compiler options raises inside another jit).
Notebooks use it too, so they get the trainer's numbers, whatever XLA_FLAGS say.

A run that is to live with the mismatch of other systems
(`precision.exact=False`) compiles with `inexact_jit` instead, and nothing else
about it differs. Which of the two, `Policy.jit` knows.
"""

import functools
import os

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.pallas import triton

from jetrl_jax.files import user_path

# Pallas' Triton backend counts the values of an array of up to 4 GiB in 32 bits
# with a sign. 8-bit values beyond this one would lie in front of their array.
MOST_VALUES = 2**31
# Said wherever a run that is compiled with `inexact_jit` says what it is.
NOT_CLAIMED = 'exactness is not claimed (precision.exact=False)'
# What numbers would be wrong without, and not only other bits.
_ALWAYS: dict[str, dict] = {
    'cpu': {
        # Only single dots may go to YNN: its rows do not depend on the number
        # of rows, while Eigen splits the contraction by it. Its larger fusions
        # compute exp(x - max) with other bits at small shapes, and in jax
        # 0.10.2 and 0.11.2 return garbage for (max, subtract, exp, dot with a
        # constant) in one fusion.
        'xla_cpu_experimental_ynn_fusion_type': (
            'LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT'
        ),
    },
    'gpu': {},
}
# Why each: see docs/numerics.md.
_EXACT: dict[str, dict] = {
    'cpu': {
        # A fusion may otherwise skip a bfloat16 rounding, differently in two
        # graphs.
        'xla_allow_excess_precision': False,
    },
    'gpu': {
        'xla_allow_excess_precision': False,
        # Triton GEMMs are chosen, and tiled, by timing: other bits per shape.
        'xla_gpu_enable_triton_gemm': False,
        # cuBLASLt's first heuristic instead of the fastest by timing: the
        # latter picks split-K for small row counts only.
        'xla_gpu_autotune_level': 0,
        # Scatter-adds (the embedding's gradient) in a fixed order.
        'xla_gpu_deterministic_ops': True,
    },
}

# For a backward pass on several devices. XLA would hide the wait for sums over
# devices behind other work: it goes down the whole chain of layers first and
# keeps all that the weights' gradients are made of: of a 7B and 18432 tokens on
# each of two H200 88.8 GB, and 22.5 in order (docs/performance.md).
_IN_ORDER: dict[str, dict] = {
    'cpu': {},
    'gpu': {'xla_gpu_enable_latency_hiding_scheduler': False},
}


def on_gpu() -> bool:
  """True when kernels compile for a GPU."""
  return jax.default_backend() in ('gpu', 'cuda')


def kernel_options(
    interpret: bool, num_warps: int, num_stages: int | None = None
) -> dict:
  """Returns keywords of `pl.pallas_call`.

  Args:
    interpret: run on a CPU, for tests.
    num_warps: of a program.
    num_stages: of its loops' loads; None is Triton's own number.
  """
  if interpret:
    return {'interpret': True}
  return {
      'compiler_params': triton.CompilerParams(
          num_warps=num_warps, num_stages=num_stages
      )
  }


def row_slices(rows: int, columns: int, multiple: int = 1) -> list[slice]:
  """Returns what a kernel may take at a time of an 8-bit matrix's rows.

  Args:
    rows: of the matrix.
    columns: of the matrix.
    multiple: of rows in each slice but the last.
  """
  step = max(MOST_VALUES // columns // multiple, 1) * multiple
  if step >= rows:
    return [slice(None)]
  return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


def lowered_once(*static: str):
  """Makes what calls a kernel one function of a program.

  Otherwise a kernel is traced and lowered again for every layer, which takes
  0.1 s each time. XLA inlines the calls: it makes the same kernels.

  Args:
    static: names of arguments that are no arrays.
  """
  return functools.partial(jax.jit, static_argnames=static)


def instruction(name: str):
  """Returns a function of float32 arrays: one instruction of the device.

  Args:
    name: in PTX, with its type, for example 'ex2.approx.ftz.f32'. Operands
      after the first may be scalars.
  """

  def call(x, *more):
    args = [x, *(jnp.broadcast_to(jnp.float32(y), x.shape) for y in more)]
    operands = ', '.join(f'${i}' for i in range(len(args) + 1))
    [result] = triton.elementwise_inline_asm(
        f'{name} {operands};',
        args=args,
        constraints='=f' + ',f' * len(args),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result

  return call


def power_of_2(x, interpret: bool):
  """Returns 2^x of float32, and 0 below 2^-126: one instruction.

  A result that small has no part in a sum with 1 in it; to keep it costs three
  instructions more.
  """
  if interpret:
    return jnp.exp2(x)
  return instruction('ex2.approx.ftz.f32')(x)


def multiply_add(a, b, c, interpret: bool):
  """Returns a * b + c of float32, rounded once; b and c may be scalars."""
  if interpret:
    return a * b + c
  return instruction('fma.rn.f32')(a, b, c)


def compiler_options(
    backend: str | None = None, *, exact: bool = True, in_order: bool = False
) -> dict:
  """Returns the options for a backend, by default the one in use.

  Args:
    backend: 'cpu', 'gpu' or 'cuda'.
    exact: False leaves to XLA (and to XLA_FLAGS) what only decides about bits.
    in_order: nothing is moved to hide a wait for other devices, which takes
      the least memory.
  """
  backend = backend or jax.default_backend()
  kind = 'gpu' if backend == 'cuda' else backend
  found = _ALWAYS[kind] | (_EXACT[kind] if exact else {})
  return found | (_IN_ORDER[kind] if in_order else {})


def exact_jit(function, *, in_order=False, **options):
  """`jax.jit` with the pinned compiler options.

  Args:
    function: pure function of pytrees.
    in_order: see `compiler_options`.
    **options: of `jax.jit`. A result that is fed back must name its place in
      `out_shardings`: the same place under another name compiles the program
      a second time. `keep_unused` passes arguments whose values nobody reads,
      so that their buffers can be reused.
  """
  pinned = compiler_options(in_order=in_order)
  return jax.jit(function, **options, compiler_options=pinned)


def inexact_jit(function, *, in_order=False, **options):
  """`exact_jit` with XLA's own choices where these only decide about bits.

  Fusions may skip roundings, kernels are chosen and tiled by timing, Triton
  GEMMs and operations that do not repeat are allowed.
  """
  pinned = compiler_options(exact=False, in_order=in_order)
  return jax.jit(function, **options, compiler_options=pinned)


def keep_compiled(folder: str | os.PathLike) -> None:
  """Keeps executables in a folder, for later processes to take from there.

  An executable is found again by its program, its compiler options, the
  library versions and the device, so what is taken is what would have been
  compiled, to the bit. The folder holds machine code: share it only with
  people whose programs you would run.

  Args:
    folder: made if absent; '' leaves everything as it is.

  Raises:
    ValueError: the folder cannot be made, or its ~ is nobody's home.
  """
  if not str(folder):
    return
  path = user_path(folder).resolve()
  try:
    path.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(
        f'compile_cache_dir: {path} cannot be made ({error.strerror}); name'
        " another folder, or '' for none"
    ) from error
  jax.config.update('jax_compilation_cache_dir', str(path))
  # Small programs too: there are hundreds, and together they take seconds.
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
  # XLA's own caches hold timings, which may choose other kernels.
  jax.config.update('jax_persistent_cache_enable_xla_caches', 'none')
  # JAX looks at the settings once, at its first compilation.
  compilation_cache.reset_cache()
