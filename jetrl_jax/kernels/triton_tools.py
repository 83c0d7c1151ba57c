"""Tools that every Triton kernel uses: options, slices, instructions.

Only `kernels/*/triton*.py` import this file, because it imports Pallas' Triton
backend, which a machine that runs the references may lack.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

from jetrl_jax.kernels import dispatch


def kernel_options(
    interpret: bool, num_warps: int, num_stages: int | None = None
) -> dict:
  """Returns keywords of `pl.pallas_call`.

  Args:
    interpret: run on a CPU, for tests.
    num_warps: the warps of a program.
    num_stages: stages of the loads in its loops; None leaves it to Triton.
  """
  if interpret:
    return {'interpret': True}
  return {
      'compiler_params': triton.CompilerParams(
          num_warps=num_warps, num_stages=num_stages
      )
  }


def row_slices(rows: int, columns: int, multiple: int = 1) -> list[slice]:
  """Returns slices of an 8-bit matrix's rows that a kernel can address.

  Args:
    rows: the number of rows of the matrix.
    columns: the number of columns of the matrix.
    multiple: every slice but the last has a multiple of so many rows.
  """
  step = max(dispatch.MOST_VALUES // columns // multiple, 1) * multiple
  if step >= rows:
    return [slice(None)]
  return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


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
