"""Invariant scaling: smaller kernels after larger norm gains (QuRL).

    W x = (W / s) (s x)

The kernels that read a norm's output (qkv, gate_up) are divided by s once,
before training, and the norm's gain is multiplied by it. In exact arithmetic
the model stays the same function. What changes is training: with the same
learning rate an update is s times as large beside its kernel, and moves more
of the quantised values. Biases are added after the dot and stay; o and down do
not follow a norm and stay, too, and so does the head, quantised or not.

With a power of two for s the model is the same to the bit in every recipe whose
scales are powers of two. With another s, gains and kernels are rounded once
more, in the masters' dtype and in the compute dtype.

References:
  QuRL, arXiv:2602.13953, update-aware quantisation; s = 1.5 there.
"""

import re

import jax
from flax import traverse_util

from jetrl_jax.core.typing import Array, PyTree

# Norms, and the kernels that read nothing but their output.
_PAIRS = {
    'attn_norm/scale': 'attn/qkv/kernel',
    'mlp_norm/scale': 'mlp/gate_up/kernel',
}
_MOST = 64.0


def check(scale: float) -> None:
  """Refuses an s that cannot be meant.

  Raises:
    ValueError: `scale` is no number from 1/64 to 64.
  """
  if not 1 / _MOST <= scale <= _MOST:
    raise ValueError(
        f'precision.invariant_scale is {scale}; allowed: 1/{_MOST:.0f} to'
        f' {_MOST:.0f}, 1 for none (QuRL uses 1.5)'
    )


def fold(params: PyTree, scale: float) -> PyTree:
  """Divides the kernels after norms by `scale` and multiplies the gains.

  Args:
    params: nested dict of masters; the leaves that change are donated.
    scale: s.
  """
  return _rescale(params, scale, donate=True)


def unfold(params: PyTree, scale: float) -> PyTree:
  """Undoes `fold`, for an export; `params` stays as it is.

  Exact for a power of two. With another s a float32 master may end one unit
  in the last place beside where it started, which an export in bfloat16
  rounds away; a bfloat16 master may end one unit of bfloat16 away from it.
  """
  return _rescale(params, 1.0 / scale, donate=False)


def _times(x: Array, factor: Array) -> Array:
  return (x.astype('float32') * factor).astype(x.dtype)


def _rescale(params: PyTree, scale: float, *, donate: bool) -> PyTree:
  if scale == 1:
    return params
  factors = {}
  for gain, kernel in _PAIRS.items():
    factors |= {gain: scale, kernel: 1.0 / scale}
  # One leaf at a time, because memory may not hold two whole trees. Layers
  # share their programs.
  times = jax.jit(_times, donate_argnums=(0,) if donate else ())
  flat = traverse_util.flatten_dict(params, sep='/')
  for path in flat:
    layer = re.fullmatch(r'layers_\d+/(.*)', path)
    if layer and layer[1] in factors:
      flat[path] = times(flat[path], factors[layer[1]])
  return traverse_util.unflatten_dict(flat, sep='/')
