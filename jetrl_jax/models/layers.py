"""The modules that own weights: dots, norms and the embedding, for rows [M, D].

A module reads each leaf from two collections. The value comes from `weights`
(the arrays that rollout and training share, made by `kernels.prepare_weights`).
The derivative goes to `params` (the masters). In the rollout there are no
`params`: nothing is differentiable then, and nothing else changes.

A caller can look at intermediate values. `tap` puts them into the collection
`TAPS` if the caller makes it mutable (`mismatch/taps.py`). Otherwise they are
not in the program.
"""

import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from jetrl_jax.core.collectives import Axes, Pieces, grad_sink
from jetrl_jax.core.compilation import on_gpu
from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8 import DeferredScale, QTensor, Recipe, formats
from jetrl_jax.fp8.products import UNQUANTIZED, RowFormat, Rows
from jetrl_jax.fp8.quantization import quantize
from jetrl_jax.fp8.scaling_state import COLLECTION, OPERANDS
from jetrl_jax.kernels.add_norm_quantize import PendingAdd, add_norm_quantize
from jetrl_jax.kernels.quantized_dot import linear

TAPS = 'taps'
_Value = TypeVar('_Value')
# Initialises kernels and embeddings.
_INIT = nn.initializers.normal(0.02)


@jax.custom_vjp
def _add_bias(y_MO, master_O, bias_O):
  """Adds a bias; its cotangent is summed in the master's dtype."""
  del master_O
  return y_MO + bias_O[None, :]


def _add_bias_fwd(y_MO, master_O, bias_O):
  return _add_bias(y_MO, master_O, bias_O), jnp.zeros((0,), master_O.dtype)


def _add_bias_bwd(like, ct_MO):
  return ct_MO, jnp.sum(ct_MO.astype(like.dtype), axis=0), None


_add_bias.defvjp(_add_bias_fwd, _add_bias_bwd)


@jax.custom_vjp
def _lookup(master_VD, compute_VD, tokens_M):
  """Looks up embedding rows; cotangents are summed in the master's dtype."""
  del master_VD
  return compute_VD[tokens_M]


def _lookup_fwd(master_VD, compute_VD, tokens_M):
  like = jnp.zeros((0, master_VD.shape[0]), master_VD.dtype)
  return compute_VD[tokens_M], (tokens_M, like)


def _lookup_bwd(residuals, ct_MD):
  tokens_M, like = residuals
  ct_MD = ct_MD.astype(like.dtype)
  # The value is always 0, but XLA cannot know that. It would make these zeros
  # beside those of the head's gradient, and keep them through all layers.
  first = ct_MD[0, 0]
  zero = jnp.where(jnp.isnan(first), first, 0)
  zeros = jnp.full((like.shape[1], ct_MD.shape[1]), zero, like.dtype)
  if not on_gpu():
    return zeros.at[tokens_M].add(ct_MD), None, None
  tokens_M, sums_MD = sum_equal(tokens_M, ct_MD)
  dropping = {'mode': 'drop', 'unique_indices': True}
  return zeros.at[tokens_M].set(sums_MD, **dropping), None, None


def sum_equal(tokens_M: Array, rows_MD: Array) -> tuple[Array, Array]:
  """Adds the rows of equal tokens, always in the same order.

  On a GPU a scatter-add that repeats to the bit sorts all M D numbers (92 ms
  for 32768 x 3584 on an H200). This function sorts M tokens and adds in a tree.

  Returns:
    (tokens [M], sums [M, D]). Each token appears once, with its sum. The other
    entries are different numbers beyond all tokens; their sums mean nothing.
  """
  order_M = jnp.argsort(tokens_M, stable=True)
  tokens_M, rows_MD = tokens_M[order_M], rows_MD[order_M]
  differs = tokens_M[1:] != tokens_M[:-1]
  first_M = jnp.concatenate([jnp.ones((1,), bool), differs])
  last_M = jnp.concatenate([differs, jnp.ones((1,), bool)])

  def join(left, right):
    (first_a, a), (first_b, b) = left, right
    return first_a | first_b, jnp.where(first_b, b, a + b)

  _, sums_MD = lax.associative_scan(join, (first_M[:, None], rows_MD))
  beyond = jnp.iinfo(jnp.int32).max - jnp.arange(
      tokens_M.shape[0], dtype=jnp.int32
  )
  return jnp.where(last_M, tokens_M, beyond), sums_MD


_lookup.defvjp(_lookup_fwd, _lookup_bwd)


def _not_before(first: Array, weight: QTensor | Array) -> QTensor | Array:
  """Returns the weight, for which a float32 [] must be there.

  XLA starts at once to gather what waits for nothing, so that every device had
  the weights of all layers in memory.
  """
  first = lax.stop_gradient(first)
  if not isinstance(weight, QTensor):
    # The value is always the weight, but XLA cannot know that.
    return jnp.where(jnp.isnan(first), first.astype(weight.dtype), weight)
  first, values = lax.optimization_barrier((first, weight.values))
  # XLA takes out of a barrier what nothing reads.
  scale = jnp.where(jnp.isnan(first), first, weight.scale)
  return QTensor(values=values, scale=scale)


def gather_quantized(
    axes: Axes, local: QTensor, full_dim: int, pieces: Pieces = ()
) -> QTensor:
  """Returns the part of a quantised kernel that this device reads.

  Scales per channel or per block are split as their rows are, see
  `Axes.gather`.
  """
  scale = local.scale
  if scale.ndim:
    rows_per_scale = local.values.shape[0] // scale.shape[0]
    groups = tuple((rows // rows_per_scale, parts) for rows, parts in pieces)
    scale = axes.gather(scale, full_dim // rows_per_scale, groups)
  values = axes.gather(local.values, full_dim, pieces)
  return QTensor(values=values, scale=scale)


def widened(axes: Axes, master, weight, whole: int) -> tuple[Any, Any]:
  """Returns a device's share of a kernel; on a CPU it is padded with zero rows.

  A CPU computes FP8 dots, and bfloat16 dots with bfloat16 results, as float32
  dots. The order in which such a dot adds depends on the largest power of two,
  up to 64, that divides its number of columns. So a share is padded to a number
  of columns that the whole kernel's power of two divides.

  Args:
    axes: devices.
    master: [o, in] or None.
    weight: [o, in], an array or quantised.
    whole: rows of the kernel on all devices together.
  """
  if axes.tensor == 1 or on_gpu():
    return master, weight
  is_quantised = isinstance(weight, QTensor)
  share = (weight.values if is_quantised else weight).shape[0]
  rows, order = share, math.gcd(whole, 64)
  while math.gcd(rows, 64) != order:
    rows += 1
  if rows == share:
    return master, weight
  zeros = (0, rows - share), (0, 0)
  if master is not None:
    master = jnp.pad(master, zeros)
  if not is_quantised:
    return master, jnp.pad(weight, zeros)
  scale = weight.scale
  if scale.ndim:  # Scales per channel. Shares of blocks need no padding.
    scale = jnp.pad(scale, zeros, constant_values=1.0)
  return master, QTensor(values=jnp.pad(weight.values, zeros), scale=scale)


class Leaf(nn.Module):
  """Base of modules that own weights; knows how a leaf is read.

  Attributes:
    recipe: how dots compute.
    axes: devices over which leaves are split.
  """

  recipe: Recipe
  axes: Axes

  def tap(self, name: str, value: _Value, shared: bool = False) -> _Value:
    """Shows a value under the module's path and returns it.

    Args:
      name: the value's name.
      value: the value.
      shared: whether each device of `tensor` has some of its columns. All
        columns are shown.
    """
    if not self.is_initializing():  # All collections are mutable then.
      shown: Any = value
      if shared and self.is_mutable_collection(TAPS):
        shown = self.axes.gather_outputs(shown)
      self.sow(TAPS, name, shown, lambda _, new: new, lambda: shown)
    return value

  def tap_rows(self, name: str, rows: Rows, row_format: RowFormat) -> None:
    """Shows the rows of the next dot, and the FP8 values that it reads."""
    if self.is_initializing() or not self.is_mutable_collection(TAPS):
      return
    x_MI, q_MI = rows.values, rows.fp8_MI
    if not isinstance(x_MI, jax.ShapeDtypeStruct):
      self.tap(name, x_MI)
      if q_MI is None and row_format.scale is not None:
        q_MI = quantize(x_MI, row_format.scale, formats.E4M3)
    if q_MI is not None:
      self.tap(f'{name}_fp8', q_MI)

  def leaf(
      self,
      name: str,
      init,
      shape: tuple[int, ...],
      pieces: Pieces = (),
      after: Array | None = None,
  ) -> tuple[Any, Any]:
    """Returns (master, compute weight).

    The master is None without a derivative. On several devices it is a stand-in
    that sends the derivative to the device that stores the master.

    Args:
      name: the leaf's name.
      init: makes the master.
      shape: shape of the whole leaf.
      pieces: which of its rows this device reads.
      after: float32 [], which must be there before devices exchange the weight.
    """
    if self.is_initializing():
      master = self.param(name, init, shape, jnp.float32)
      return master, master.astype(self.recipe.dtype)
    compute = self.get_variable('weights', name)
    here = compute.values if isinstance(compute, QTensor) else compute
    if after is not None and here.shape[0] != shape[0]:
      compute = _not_before(after, compute)
    if isinstance(compute, QTensor):
      compute = gather_quantized(self.axes, compute, shape[0], pieces)
    else:
      compute = self.axes.gather(compute, shape[0], pieces)
    if not self.has_variable('params', name):
      return None, compute
    master = self.get_variable('params', name)
    if self.axes.devices > 1:
      master = grad_sink(self.axes, shape, master, pieces, after)
    return master, compute


class Linear(Leaf):
  """y = x W^T + b, with W stored [out, in].

  Attributes:
    in_dim: I.
    out_dim: O, on all devices together.
    pieces: which outputs this device computes.
    use_bias: whether there is a bias b.
    late_scale: see `products.scaled_dot`.
  """

  in_dim: int
  out_dim: int
  pieces: Pieces = ()
  use_bias: bool = False
  late_scale: bool = False

  def kernel(self, after: Array | None = None) -> tuple[Any, Any]:
    """Returns (master or None, weight), see `linear.dot` and `leaf`."""
    shape = (self.out_dim, self.in_dim)
    return self.leaf('kernel', _INIT, shape, self.pieces, after)

  @property
  def _columns(self) -> int:
    """Outputs that this device computes."""
    if self.axes.tensor == 1:
      return self.out_dim
    return sum(rows // parts for rows, parts in self.pieces) or self.out_dim

  def _bias(self) -> tuple[Any, Any]:
    zeros = nn.initializers.zeros
    return self.leaf('bias', zeros, (self.out_dim,), self.pieces)

  def constant_bias(self) -> Array:
    """Returns the bias in the compute dtype, through which no gradient goes."""
    bias = self.get_variable('weights', 'bias')
    return lax.stop_gradient(self.axes.gather(bias, self.out_dim, self.pieces))

  @property
  def is_quantized(self) -> bool:
    """Whether the kernel is in 8 bits."""
    return isinstance(self.get_variable('weights', 'kernel'), QTensor)

  def row_format(self) -> RowFormat:
    """Returns the form in which this dot wants its rows."""
    if self.is_initializing() or not self.recipe.is_delayed:
      return UNQUANTIZED
    if not self.is_quantized:
      return UNQUANTIZED
    scale = self.get_variable(COLLECTION, 'input')['scale']
    return RowFormat(scale=scale)

  def operands(
      self, kernel=None, after: Array | None = None
  ) -> tuple[Any, Any, PyTree | None]:
    """Returns (master or None, weight, dot_state), see `linear.dot`."""
    master, weight = kernel or self.kernel(after)
    if not isinstance(weight, QTensor):
      return master, weight, None
    dot_state = {name: self.get_variable(COLLECTION, name) for name in OPERANDS}
    return master, weight, dot_state

  @nn.compact
  def __call__(
      self,
      rows: Rows,
      row_mask_M: Array,
      *,
      out_dtype=None,
      kernel=None,
      defer: bool = False,
      after: Array | None = None,
  ) -> Array | DeferredScale:
    """Returns [M, O].

    Args:
      rows: the rows [M, I].
      row_mask_M: float32, 0 on rows that are padding.
      out_dtype: dtype of the result, by default that of the rows.
      kernel: the result of `kernel`, if the caller has it already.
      defer: leave scale and bias to the operation that reads the result, if the
        recipe allows it. Such a dot has no derivative. Without `late_scale` the
        product is then float32, as inside a GEMM that adds a residual.
      after: see `leaf`.
    """
    operands = self.operands(kernel, after)
    if defer or rows.in_parts:
      product = linear.unscaled_dot(
          self.recipe,
          rows.values,
          *operands[1:],
          late_scale=self.late_scale,
          fp8_MI=rows.fp8,
      )
      if product is not None:
        if not self.use_bias:
          return product
        _, bias = self._bias()
        return linear.defer_bias(product, bias)
      assert not rows.in_parts  # Only a dot that can defer asks for them.
    if self.pieces and out_dtype is None and not self.late_scale:
      out_dtype = linear.added_dtype(self.recipe, operands[1], self.axes.tensor)
    y_MO = linear.dot(
        self.recipe,
        rows.values,
        *widened(self.axes, *operands[:2], self.out_dim),
        operands[2],
        row_mask_M,
        out_dtype=out_dtype,
        fp8_MI=rows.fp8,
        late_scale=self.late_scale,
    )
    y_MO = y_MO[:, : self._columns]
    if self.use_bias:
      master, bias = self._bias()
      if master is None:
        y_MO = y_MO + bias[None, :]
      else:
        y_MO = _add_bias(y_MO, master, bias)
    return self.tap('out', y_MO, shared=bool(self.pieces))


class RMSNorm(Leaf):
  """Root-mean-square norm with a gain.

  Attributes:
    dim: D.
    eps: added to the mean square.
    of_heads: whether the rows are heads; each device has some of them.
  """

  dim: int
  eps: float
  of_heads: bool = False

  @nn.compact
  def __call__(
      self,
      residual: Array | PendingAdd,
      row_format: RowFormat = UNQUANTIZED,
  ) -> tuple[Array, Rows]:
    """Returns (the residual stream [M, D], the normed rows).

    Args:
      residual: the residual stream, or the sum that this norm has to make.
      row_format: the form in which the dot that follows wants its rows.
    """
    master, gain_D = self.leaf('scale', nn.initializers.ones, (self.dim,))
    if self.of_heads and master is not None:
      master = self.axes.enter(master)
    x_MD, rows = add_norm_quantize(
        residual, gain_D, self.eps, master, row_format
    )
    self.tap('in', x_MD)
    self.tap_rows('out', rows, row_format)
    return x_MD, rows


class Embedding(Leaf):
  """Token embedding, and the head's kernel when tied."""

  vocab_size: int
  model_dim: int
  pieces: Pieces = ()

  def setup(self):
    """Reads the table once for both uses."""
    shape = (self.vocab_size, self.model_dim)
    self.table = self.leaf('embedding', _INIT, shape, self.pieces)

  def __call__(self, tokens_M: Array) -> Array:
    """Returns the tokens' rows, [M, D]."""
    master, compute = self.table
    tokens_M, here_M = self.axes.pick_rows(tokens_M, compute.shape[0])
    if master is None:
      x_MD = compute[tokens_M]
    else:
      x_MD = _lookup(master, compute, tokens_M)
    return self.tap('out', self.axes.join(x_MD, here_M))

  def kernel(self) -> tuple[Any, Any]:
    """Returns (master or None, weight) of a tied head, see `linear.dot`."""
    return self.table

  def logits(self, hidden_MD: Array, row_mask_M: Array, kernel=None) -> Array:
    """Returns float32 logits of a tied head; `kernel` as for `Linear`."""
    master, compute = kernel or self.table
    columns = compute.shape[0]
    master, compute = widened(self.axes, master, compute, self.vocab_size)
    return linear.dot(
        self.recipe,
        hidden_MD,
        master,
        compute,
        None,
        row_mask_M,
        out_dtype=jnp.float32,
    )[:, :columns]
