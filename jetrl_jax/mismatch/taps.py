"""The run's own functions with intermediate values as additional outputs.

An additional output makes another program, which XLA may fuse differently. So a
caller who reads a tapped value also compares the log-probs of the tapped
program with those of the run's program (see `bisect.py`).
"""

import dataclasses
import functools
from typing import Any

import jax
from flax import traverse_util

from jetrl_jax.core.compile_ahead import Program
from jetrl_jax.core.sharding import ROWS
from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.kernels.log_sum_exp import temper
from jetrl_jax.models.layers import TAPS
from jetrl_jax.models.policy import Policy
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.objective import LossFunction
from jetrl_jax.rl.rollout import decode_step
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.run import gradients
from jetrl_jax.rl.types import TrainBatch

# The head's taps; all others have the paths of `models/decoder.py`.
LOGITS, LOGSUMEXP = 'logits', 'logsumexp'


@dataclasses.dataclass(frozen=True, kw_only=True)
class TappedPolicy(Policy):
  """A policy that keeps intermediate values.

  Attributes:
    wanted: paths of the taps to keep.
    seen: the values that the traced function has kept, until `take`.
  """

  wanted: tuple[str, ...]
  seen: dict[str, Array] = dataclasses.field(
      default_factory=dict, compare=False
  )

  def take(self) -> dict[str, Array]:
    """Returns the kept values; call it within the same trace."""
    taken = dict(self.seen)
    self.seen.clear()
    return taken

  def leave(self, name: str, value: Array) -> None:
    """Keeps a value for `take`, if it is wanted."""
    if name in self.wanted:
      self.seen[name] = value

  def _apply(self, tree: PyTree, *args, **kwargs) -> Any:
    if kwargs.get('method') == 'head':  # This is inside a loop over chunks.
      return super()._apply(tree, *args, **kwargs)
    found, shown = self.decoder.apply(tree, *args, mutable=[TAPS], **kwargs)
    taps: dict[str, Any] = traverse_util.flatten_dict(
        shown.get(TAPS, {}), sep='/'
    )
    for path, value in taps.items():
      # Each value becomes one row per token.
      self.leave(path, value.reshape(args[0].shape[0], -1))
    return found

  def logprobs(self, params, batch, temperature, masters=None):
    """See `Policy.logprobs`."""
    if LOGITS not in self.wanted and LOGSUMEXP not in self.wanted:
      return super().logprobs(params, batch, temperature, masters)
    logprobs_BT, entropy_BT, logits_MV, lse_M = self.target_logprobs(
        params, batch, temperature, masters, show=True
    )
    self.leave(LOGITS, logits_MV)
    self.leave(LOGSUMEXP, lse_M[:, None])
    return logprobs_BT, entropy_BT

  def log_sum_exp(self, logits_BV, inverse_B, known_B, slots):
    """See `Policy.log_sum_exp`."""
    lse_B = super().log_sum_exp(logits_BV, inverse_B, known_B, slots)
    for name, values in (
        (LOGITS, temper(logits_BV, inverse_B[:, None])),
        (LOGSUMEXP, lse_B[:, None]),
    ):
      if name in self.wanted:
        self.leave(name, *self.axes.all_rows([values], slots))
    return lse_B


def tapped(policy: Policy, wanted: tuple[str, ...]) -> TappedPolicy:
  """Returns the policy with taps.

  A value that lies within a kernel has none.
  """
  fields = {
      field.name: getattr(policy, field.name)
      for field in dataclasses.fields(policy)
  }
  return TappedPolicy(**fields, wanted=wanted)


def _prefill(policy: TappedPolicy, params, tokens_PT, lengths_P):
  caches = policy.prefill(params, tokens_PT, lengths_P)
  return caches, policy.take()


def _step(
    policy: TappedPolicy, config, steps_per_sync, params, state, base_key, steps
):
  del steps_per_sync, steps  # Always one step, outside of the loop.
  state = decode_step.step(policy, config, params, base_key, state)
  return state, policy.take()


class TappedEngine(Engine):
  """An engine whose prefills and decode steps append their taps to `seen`.

  Its policy is a `TappedPolicy`. Call `generate_block` for one step at a time.
  """

  def __init__(self, policy: TappedPolicy, config, mesh):
    super().__init__(policy, config, mesh)
    self.seen: list[dict[str, Array]] = []

  def _jit(self, function, in_specs, out_specs, **options):
    with_taps = {decode_step.prefill: _prefill, decode_step.generate: _step}
    run = super()._jit(
        functools.partial(with_taps[function.func], *function.args),
        in_specs,
        (out_specs, ROWS),
        **options,
    )

    def call(*args):
      found, taps = run(*args)
      self.seen.append(taps)
      return found

    return Program(call)


def tapped_update(
    policy: TappedPolicy,
    loss_function: LossFunction,
    state: TrainState,
    batch: TrainBatch,
    temperature: Array,
) -> tuple[Any, Array, dict[str, Array]]:
  """Returns (gradients, log-probs [B, T], taps) of one micro-batch.

  It differentiates the same function as `accumulate`. The gradients are outputs
  so that the backward pass is not dead code, because it affects the program.
  """

  # The taps leave where metrics do.
  def leaving(batch, logprobs_BT, entropy_BT) -> Any:
    loss, _ = loss_function(batch, logprobs_BT, entropy_BT)
    return loss, policy.take()

  grads, (taps, logprobs_BT, _) = jax.grad(
      gradients.differentiable_loss(policy, leaving, state, batch, temperature),
      argnums=(0, 1),
      has_aux=True,
  )(state.trainable, state.fp8_state)
  trainable, fp8_state = grads
  observed = scaling_state.reduce_over_devices(
      scaling_state.stack_observations(fp8_state), policy.axes
  )
  return (trainable, observed), logprobs_BT, taps
