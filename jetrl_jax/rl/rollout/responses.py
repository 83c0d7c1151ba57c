"""Copies finished responses from the device to the host."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jetrl_jax.core import collectives, sharding
from jetrl_jax.core.typing import NpArray
from jetrl_jax.rl.rollout.decode_state import DecodeState

# Responses that each device sends at once: a visit of the host seldom needs
# more, and there is one shape to compile.
_ROWS = 16


def _pick(tokens_BR, log_mu_BR, logprobs_BR, slots_K):
  return tokens_BR[slots_K], log_mu_BR[slots_K], logprobs_BR[slots_K]


class Responses:
  """Copies the responses of some slots to the host.

  All responses of 256 slots with 16384 tokens would be 48 MiB, and the device
  would wait for the copy.

  Args:
    mesh: devices; the slots are split over them.
    per_device: slots per device.
  """

  def __init__(self, mesh: Mesh, per_device: int):
    self._per_device = per_device
    self._devices = collectives.axes_of(mesh).size
    rows = sharding.ROWS
    self._rows = NamedSharding(mesh, rows)
    self._pick = jax.jit(
        sharding.per_device(_pick, mesh, (rows,) * 4, rows),
        out_shardings=self._rows,
    )

  def __call__(
      self, state: DecodeState, slots: Sequence[int]
  ) -> dict[int, tuple[NpArray, NpArray, NpArray]]:
    """Returns slot -> (tokens, log mu, log pi), each [max_response_length]."""
    left: list[list[int]] = [[] for _ in range(self._devices)]
    for slot in slots:
      left[slot // self._per_device].append(slot)
    found = {}
    while any(left):
      # Slots by their number on their device; nobody reads the padding.
      local_DK = np.zeros((self._devices, _ROWS), np.int32)
      row: dict[int, int] = {}
      for d, mine in enumerate(left):
        for k, slot in enumerate(mine[:_ROWS]):
          local_DK[d, k] = slot % self._per_device
          row[slot] = d * _ROWS + k
        del mine[:_ROWS]
      local_K = sharding.put(local_DK.reshape(-1), self._rows)
      tokens, log_mu, logprobs = jax.device_get(
          self._pick(state.tokens, state.log_mu, state.logprobs, local_K)
      )
      for slot, i in row.items():
        found[slot] = tokens[i], log_mu[i], logprobs[i]
    return found
