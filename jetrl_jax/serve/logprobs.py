"""Log-probs of given tokens, and the most probable tokens in their places.

The function is the one whose log-probs training computes
(`Policy.target_logprobs`), in a row of its own for each sequence. What the
rollout engine recorded for a response has the same bits in a unified flow.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jetrl_jax.core import sharding
from jetrl_jax.core.typing import NpArray
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.rl.rollout.buckets import buckets

# The largest number that a request can ask for.
MOST_TOP = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
  """The policy's log-probs for the tokens of one sequence.

  Index t is about token t given those before it. Index 0 is meaningless.

  Attributes:
    logprobs: float32 [T], nats.
    top_ids: int32 [T, MOST_TOP], the most probable tokens first.
    top_logprobs: float32 [T, MOST_TOP], nats.
  """

  logprobs: NpArray
  top_ids: NpArray
  top_logprobs: NpArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rows:
  """What `Policy.hidden` reads, [B, T] each."""

  tokens: Any
  positions: Any
  segment_ids: Any


class SequenceLogprobs:
  """Computes the log-probs of given sequences, one at a time.

  Args:
    policy: the functions.
    mesh: devices; all but those of the first rows compute padding.
    longest: tokens of the longest sequence.
    params_spec: PartitionSpecs of the parameters; see `Engine.reader`.
  """

  def __init__(
      self, policy: Policy, mesh: Mesh, longest: int, params_spec: Any
  ):
    self._rows_of = NamedSharding(mesh, sharding.ROWS)
    self._num_rows = policy.axes.size
    self._top = min(MOST_TOP, policy.model.vocab_size)
    self.lengths = buckets(longest, policy.tile, 4)

    def logprobs_of(params, rows, temperature):
      logprobs_BT, _, z_MV, lse_M = policy.target_logprobs(
          params, rows, temperature, None, show=True
      )
      shape = (*logprobs_BT.shape, self._top)
      top_MK, ids_MK = lax.top_k(z_MV, self._top)
      return (
          logprobs_BT,
          ids_MK.reshape(shape),
          (top_MK - lse_M[:, None]).reshape(shape),
      )

    rows = sharding.ROWS
    self._logprobs_of = policy.jit_per_device(
        logprobs_of, mesh, (params_spec, rows, P()), rows
    )

  def __call__(
      self, params: PolicyParams, tokens: NpArray, temperature: float
  ) -> TokenLogprobs:
    """Returns log-probs under the softmax of its tempered logits.

    Args:
      params: weights and scales.
      tokens: int32 [T], 1 to `longest`.
      temperature: 0 counts as 1.
    """
    count = len(tokens)
    length = next(size for size in self.lengths if size >= count)
    tokens_BT, positions_BT, segments_BT = np.zeros(
        (3, self._num_rows, length), np.int32
    )
    tokens_BT[0, :count] = tokens
    positions_BT[0, :count] = np.arange(count)
    segments_BT[0, :count] = 1
    rows = _Rows(
        tokens=tokens_BT, positions=positions_BT, segment_ids=segments_BT
    )
    found = self._logprobs_of(
        params, jax.device_put(rows, self._rows_of), jnp.float32(temperature)
    )
    logprobs_T, ids_TK, top_TK = (np.asarray(x)[0, :count] for x in found)
    # Row t of the logits predicts token t + 1.
    return TokenLogprobs(
        logprobs=logprobs_T,
        top_ids=np.roll(ids_TK, 1, axis=0),
        top_logprobs=np.roll(top_TK, 1, axis=0),
    )
