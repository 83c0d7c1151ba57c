"""Compiles functions with the options that exactness needs.

The building blocks are plain functions, and only the outermost function is
compiled, with `exact_jit` (a jit with compiler options raises inside another
jit). Notebooks use it too, so they get the trainer's numbers for any XLA_FLAGS.

A run with `precision.exact=False` accepts the mismatch that other systems have.
It compiles with `inexact_jit` instead and differs in nothing else. `Policy.jit`
chooses between the two.
"""

import os

import jax
from jax.experimental.compilation_cache import compilation_cache

from jetrl_jax.core.files import user_path

# Part of every message about a run that is compiled with `inexact_jit`.
NOT_CLAIMED = 'exactness is not claimed (precision.exact=False)'
# Options without which numbers would be wrong, not only different in bits.
_ALWAYS: dict[str, dict] = {
    'cpu': {
        # Only single dots may go to YNN. In YNN a row does not depend on the
        # number of rows; Eigen splits the contraction by that number. YNN's
        # larger fusions compute exp(x - max) with other bits at small shapes.
        # In jax 0.10.2 and 0.11.2 they return garbage for (max, subtract, exp,
        # dot with a constant) in one fusion.
        'xla_cpu_experimental_ynn_fusion_type': (
            'LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT'
        ),
    },
    'gpu': {},
}
# docs/numerics.md gives the reason for each.
_EXACT: dict[str, dict] = {
    'cpu': {
        # Otherwise a fusion may skip a bfloat16 rounding, and two graphs may
        # skip different ones.
        'xla_allow_excess_precision': False,
    },
    'gpu': {
        'xla_allow_excess_precision': False,
        # Timing selects and tiles Triton GEMMs, so bits would differ by shape.
        'xla_gpu_enable_triton_gemm': False,
        # Use cuBLASLt's first heuristic. Selection by timing would pick split-K
        # for small row counts only.
        'xla_gpu_autotune_level': 0,
        # Scatter-adds (the embedding's gradient) add in a fixed order.
        'xla_gpu_deterministic_ops': True,
    },
}

# For a backward pass on several devices. By default XLA hides the wait for sums
# over devices: it runs through all layers first and keeps all inputs of the
# weights' gradients. For a 7B model with 18432 tokens on each of two H200 this
# takes 88.8 GB, and 22.5 GB in order (docs/performance.md).
_IN_ORDER: dict[str, dict] = {
    'cpu': {},
    'gpu': {'xla_gpu_enable_latency_hiding_scheduler': False},
}


def on_gpu() -> bool:
  """Returns whether kernels are compiled for a GPU."""
  return jax.default_backend() in ('gpu', 'cuda')


def compiler_options(
    backend: str | None = None, *, exact: bool = True, in_order: bool = False
) -> dict:
  """Returns the options for a backend, by default the one in use.

  Args:
    backend: 'cpu', 'gpu' or 'cuda'.
    exact: False leaves options that only change bits to XLA and XLA_FLAGS.
    in_order: whether to run operations in order instead of hiding the wait for
      other devices; this takes the least memory.
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
    **options: options of `jax.jit`. If a result becomes an argument of the next
      call, set `out_shardings`; an equal sharding with another name would
      compile the program a second time. `keep_unused` passes arguments that
      are not read, so that their buffers can be reused.
  """
  pinned = compiler_options(in_order=in_order)
  return jax.jit(function, **options, compiler_options=pinned)


def inexact_jit(function, *, in_order=False, **options):
  """`jax.jit` with XLA's default options, where these only change bits.

  Fusions may skip roundings, timing selects and tiles kernels, and Triton GEMMs
  and non-deterministic operations are allowed.
  """
  pinned = compiler_options(exact=False, in_order=in_order)
  return jax.jit(function, **options, compiler_options=pinned)


def keep_compiled(folder: str | os.PathLike) -> None:
  """Keeps executables in a folder, so that later processes can reuse them.

  The key of an executable is its program, its compiler options, the library
  versions and the device. A reused executable is therefore the one that would
  have been compiled. The folder holds machine code: share it only with people
  whose programs you would run.

  Args:
    folder: it is created if missing; '' changes nothing.

  Raises:
    ValueError: the folder cannot be created, or its ~ names no home folder.
  """
  if not str(folder):
    return
  path = user_path(folder).resolve()
  try:
    path.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(
        f'compile_cache_dir: {path} cannot be created ({error.strerror});'
        " choose another folder, or '' for none"
    ) from error
  jax.config.update('jax_compilation_cache_dir', str(path))
  # Keep small programs too, because compiling hundreds of them takes seconds.
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
  # XLA's own caches hold timings, which may select other kernels.
  jax.config.update('jax_persistent_cache_enable_xla_caches', 'none')
  # JAX reads these settings only once, at its first compilation.
  compilation_cache.reset_cache()
