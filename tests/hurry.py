"""Compiling in a hurry, for kernels that are interpreted."""

import jax

from jetrl_jax.core import compilation

_FEW_OPTIMISATIONS = {
    'xla_backend_optimization_level': 0,
    'xla_llvm_disable_expensive_passes': True,
}


def fast_compile_jit(function):
  """`exact_jit` with few optimisations: half the time to compile.

  Interpreting a kernel makes a large program that runs for milliseconds. Its
  last bits may be others than those of a run: for tests with a tolerance, or
  of what rounds nowhere. A jit around it takes its options too.
  """
  options = compilation.compiler_options() | _FEW_OPTIMISATIONS
  return jax.jit(function, compiler_options=options)
