"""JetStream's Engine API, written anew for this project.

The methods and their roles are those of JetStream's last published version:
prefill a prompt once, insert its cache into one or more slots, generate one
token for every slot, free a slot. An orchestrator that knows only these methods
can drive a policy. Two things differ. Prefill samples nothing; the first
generate step feeds the last prompt token, so the same code computes every
response token. And the engine can also take many generate steps on the device
per host visit.
"""

import abc
import dataclasses
from typing import Any

import jax

from jetrl_jax.core.typing import Array, NpArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultTokens:
  """The result of one generate step.

  Attributes:
    data: int32 [slots, 3]: token, 1 if the slot was active, response tokens so
      far. It is one array, so that one copy to the host is enough.
    log_prob: float32 [slots], nats, under the softmax of all tempered logits.
    log_mu: float32 [slots], nats, under the distribution that was sampled.
  """

  data: Array
  log_prob: Array
  log_mu: Array

  def slot(self, slot: int) -> tuple[int, bool, int]:
    """Returns (token, valid, length) of one slot."""
    token, valid, length = (int(x) for x in self.data[slot])
    return token, bool(valid), length


class Engine(abc.ABC):
  """Prefill, insert, generate; every call takes the parameters."""

  @abc.abstractmethod
  def load_params(self) -> Any:
    """Returns the parameters for `prefill` and `generate`."""

  @abc.abstractmethod
  def init_decode_state(self) -> Any:
    """Returns a decode state with every slot idle."""

  @abc.abstractmethod
  def prefill(
      self, *, params: Any, padded_tokens: NpArray, true_length: int
  ) -> Any:
    """Computes the cache of one prompt.

    Args:
      params: what `load_params` returned.
      padded_tokens: int32 [T], the prompt, padded at the end.
      true_length: number of tokens without padding, at least 1.

    Returns:
      A prefix for `insert`.
    """

  @abc.abstractmethod
  def insert(self, prefix: Any, decode_state: Any, slot: int) -> Any:
    """Starts a sequence in a slot from a prefix; returns the next state."""

  @abc.abstractmethod
  def bulk_insert(
      self, prefix: Any, decode_state: Any, slots: list[int]
  ) -> Any:
    """Starts one sequence per slot, all from the same prefix."""

  @abc.abstractmethod
  def generate(
      self, params: Any, decode_state: Any
  ) -> tuple[Any, ResultTokens]:
    """Takes one step in all active slots."""

  @abc.abstractmethod
  def free_resource(self, slot: int, decode_state: Any) -> Any:
    """Makes a slot idle; returns the next state."""

  @property
  @abc.abstractmethod
  def max_concurrent_decodes(self) -> int:
    """Number of slots."""

  @property
  @abc.abstractmethod
  def max_prefill_length(self) -> int:
    """Longest prompt, in tokens."""

  @property
  def samples_per_slot(self) -> int:
    """Sequences per slot: always 1."""
    return 1
