"""How a kernel is called: as one function of a program."""

import functools

import jax


def lowered_once(*static: str):
  """Makes what calls a kernel one function of a program.

  Otherwise a kernel is traced and lowered again for every layer, which takes
  0.1 s each time. XLA inlines the calls: it makes the same kernels.

  Args:
    static: names of arguments that are no arrays.
  """
  return functools.partial(jax.jit, static_argnames=static)
