"""Health: how well the 8-bit formats fit, as sums per operand."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8 import formats
from jetrl_jax.fp8.quantization import QTensor, scale_of_elements
from jetrl_jax.fp8.recipes import LM_HEAD

# The five sums of a dot state's `health`.
SUMS = ('elements', 'saturated', 'flushed', 'signal', 'noise')

# (amax, sums) of an operand.
OperandStats: TypeAlias = tuple[Array, Array]


def with_elements(
    quantization_error: Array, columns: int, row_mask_M: Array
) -> Array:
  """Returns the float32 [5] sums, given all except the first."""
  elements = jnp.sum(row_mask_M) * columns
  return jnp.concatenate([elements[None], quantization_error])


def measure(x_MI: Array, quantized: QTensor, row_mask_M: Array) -> OperandStats:
  """Returns the amax of the valid rows and float32 [5] sums over them.

  Args:
    x_MI: the values before quantisation.
    quantized: its 8-bit values and scale.
    row_mask_M: float32, 0 on rows that do not count.
  """
  valid = row_mask_M[:, None] > 0
  x = jnp.where(valid, x_MI.astype(jnp.float32), 0.0)
  stored = quantized.values.astype(jnp.float32)
  scale = scale_of_elements(quantized)
  restored = jnp.where(valid, stored * scale, 0.0)
  # A scale that is computed from an amax may miss it by up to three roundings.
  limit = formats.format_max(quantized.values.dtype) * scale * (1 + 2.0**-22)
  quantization_error = jnp.stack(
      [
          jnp.sum((jnp.abs(x) > limit).astype(jnp.float32)),
          jnp.sum(((x != 0) & (stored == 0)).astype(jnp.float32)),
          jnp.sum(x * x),
          jnp.sum((x - restored) ** 2),
      ]
  )
  sums = with_elements(quantization_error, x_MI.shape[1], row_mask_M)
  return amax_of_rows(x_MI, row_mask_M), sums


def amax_of_rows(x_MI: Array, row_mask_M: Array) -> Array:
  """Returns the amax of the rows whose mask is not 0, float32."""
  valid = row_mask_M[:, None] > 0
  return jnp.max(jnp.abs(jnp.where(valid, x_MI.astype(jnp.float32), 0.0)))


def summarize(fp8_state: PyTree, paths: list[str]) -> dict[str, dict]:
  """Returns the health of every dot, for a log (on the host).

  Args:
    fp8_state: the scaling state, on the host, after the step's rolls.
    paths: see `scaling_state.dot_paths`.

  Returns:
    path -> operand -> {amax, scale, saturated_frac, flushed_frac, sqnr_db}.
    Shares count the elements of valid rows; they are absent if nothing was
    quantised. sqnr_db = 10 log10(signal / noise) is absent if nothing was lost
    or all values were 0. A dynamic recipe has no `scale`.
  """
  summary = {}
  for path in paths:
    dot_state = fp8_state
    for key in path.split('/'):
      dot_state = dot_state[key]
    summary[path] = {
        operand: _summarize_operand(entry)
        for operand, entry in dot_state.items()
    }
  return summary


def _summarize_operand(entry: PyTree) -> dict[str, float]:
  elements, saturated, flushed, signal, noise = (
      float(x) for x in np.asarray(entry['health'])
  )
  if 'amax' in entry:
    summary = {'amax': float(entry['amax'])}
  else:
    history = np.asarray(entry['amax_history'])
    # Entry 0 is empty right after a roll; then the newest is entry 1.
    summary = {
        'amax': float(history[0] or history[1]),
        'scale': float(entry['scale']),
    }
  if elements:
    summary |= {
        'saturated_frac': saturated / elements,
        'flushed_frac': flushed / elements,
    }
  if signal > 0 and noise > 0:
    summary['sqnr_db'] = 10 * float(np.log10(signal / noise))
  return summary


def shares(
    summary: Mapping[str, Any], name: str
) -> Iterator[tuple[str, str, float]]:
  """Yields (dot, operand, share) of all measured, meaningful shares.

  The flushed share of the logits' gradient means nothing: most entries of a
  softmax are close to 0, and losing them does not matter.

  Args:
    summary: the result of `summarize`.
    name: 'saturated_frac' or 'flushed_frac'.
  """
  for dot, operands in summary.items():
    for operand, entry in operands.items():
      tail = (name, dot, operand) == ('flushed_frac', LM_HEAD, 'output_grad')
      if name in entry and not tail:
        yield dot, operand, entry[name]


def headline(summary: dict[str, dict]) -> dict[str, float]:
  """Returns the worst dot's values for each operand, as scalars."""
  metrics = {}
  for operand in ('input', 'kernel', 'output_grad'):
    for name in ('saturated_frac', 'flushed_frac'):
      found = [share for _, of, share in shares(summary, name) if of == operand]
      if found:
        metrics[f'fp8/{operand}/{name}/max'] = max(found)
    entries = [
        dot_state[operand]
        for dot_state in summary.values()
        if operand in dot_state
    ]
    ratios = [e['sqnr_db'] for e in entries if 'sqnr_db' in e]
    if ratios:
      metrics[f'fp8/{operand}/sqnr_db/min'] = min(ratios)
  return metrics
