"""The one place that compiles, with the options that exactness rests on.

The building blocks are plain functions; `exact_jit` is applied at the outermost
boundary only (a jit with compiler options raises inside another jit).
Notebooks use it too, so they get the trainer's numbers, whatever XLA_FLAGS say.

A run that is to live with the mismatch of other systems
(`precision.exact=False`) compiles with `inexact_jit` instead, and nothing else
about it differs. Which of the two, `Policy.jit` knows.
"""

import os

import jax
from jax.experimental.compilation_cache import compilation_cache

from jetrl_jax.core.files import user_path

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
