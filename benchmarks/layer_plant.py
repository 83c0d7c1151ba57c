"""Plants massive activations in a copy of a model's masters.

Large models have values of hundreds to thousands in few channels of the
residual stream, at first tokens, from an early layer on (Sun et al. 2024,
arXiv:2402.17762). They come of neurons of an early MLP that fire for the first
token alone. Such neurons are made here: with x_0 the first token's row before
gate_up and S the second moment of all other rows,

    v = S^-1 x_0 / (x_0 . S^-1 x_0)      so that x_0 . v = 1, others near 0
    gate = g v,  up = g v,  g = sqrt(size)

so that silu(gate) * up is about `size` at first tokens. The neuron's column of
down writes it into one channel of the residual stream, with weight 1. Neurons
that matter least make room. Nothing downstream is compensated: compare recipes
with BF16 of the same planted model.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jetrl_jax.core.typing import PyTree

# Relative to the mean diagonal entry of S.
_RIDGE = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plant:
  """Where massive activations arise.

  Attributes:
    layer: whose MLP makes them.
    neurons: of that MLP.
    channels: of the residual stream, one per neuron.
    direction_D: v.
  """

  layer: int
  neurons: tuple[int, ...]
  channels: tuple[int, ...]
  direction_D: np.ndarray

  @property
  def dot(self) -> str:
    """The dot that reads the massive values."""
    return f'layers_{self.layer}/mlp/down'


def find(
    params: PyTree,
    layer: int,
    rows_MD: np.ndarray,
    hidden_MF: np.ndarray,
    first_M: np.ndarray,
    count: int = 2,
) -> Plant:
  """Chooses neurons, channels and the direction of the first token.

  Args:
    params: masters.
    layer: whose MLP is changed.
    rows_MD: what its gate_up reads, valid rows alone.
    hidden_MF: what its down reads.
    first_M: True at first tokens.
    count: neurons.

  Raises:
    ValueError: no row is a first token, or all are.
  """
  if first_M.all() or not first_M.any():
    raise ValueError('there must be first tokens and others')
  rows_MD = rows_MD.astype(np.float64)
  x_D, others = rows_MD[first_M].mean(0), rows_MD[~first_M]
  moment = others.T @ others / len(others)
  moment += _RIDGE * np.trace(moment) / len(moment) * np.eye(len(moment))
  v_D = np.linalg.solve(moment, x_D)
  v_D /= x_D @ v_D
  down = np.asarray(params[f'layers_{layer}']['mlp']['down']['kernel'])
  writes_F = np.linalg.norm(down.astype(np.float64), axis=0)
  size_F = np.sqrt(np.mean(hidden_MF.astype(np.float64) ** 2, axis=0))
  gain_D = np.abs(np.asarray(params['final_norm']['scale'], np.float64))
  return Plant(
      layer=layer,
      neurons=tuple(int(n) for n in np.argsort(writes_F * size_F)[:count]),
      channels=tuple(int(c) for c in np.argsort(gain_D)[:count]),
      direction_D=v_D,
  )


def planted(params: PyTree, plant: Plant, size: float) -> PyTree:
  """Returns masters whose first tokens have activations of `size`.

  Args:
    params: masters; all but one MLP's are shared.
    plant: see `find`.
    size: of the MLP's hidden value and of what it adds to the stream.
  """
  name = f'layers_{plant.layer}'
  mlp: Any = params[name]['mlp']
  gate_up, down = mlp['gate_up']['kernel'], mlp['down']['kernel']
  ffn = down.shape[1]
  row_D = jnp.asarray(np.sqrt(size) * plant.direction_D, gate_up.dtype)
  for neuron, channel in zip(plant.neurons, plant.channels, strict=True):
    # Gate's rows come before up's.
    gate_up = gate_up.at[neuron].set(row_D).at[ffn + neuron].set(row_D)
    down = down.at[:, neuron].set(0.0).at[channel, neuron].set(1.0)
  changed = mlp | {
      'gate_up': mlp['gate_up'] | {'kernel': gate_up},
      'down': mlp['down'] | {'kernel': down},
  }
  return params | {name: params[name] | {'mlp': changed}}
