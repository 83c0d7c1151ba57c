"""The contract of a JetStream engine, in this project's own words.

The methods and their roles are those of JetStream's Engine API (the shape of
its last published head): prefill a prompt once, insert its cache into one or
more slots, generate one token for every slot at a time, free a slot. An
orchestrator that knows only these methods can drive a policy. Two things
differ. Prefill samples nothing: the last prompt token is fed by the first
generate step, so that every response token comes from the same code. And
generate has an on-device form that takes many steps per host visit.
"""

import abc
import dataclasses
from typing import Any

import jax

from jetrl_jax.core.typing import Array, NpArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultTokens:
  """What one generate step gave every slot.

  Attributes:
    data: int32 [slots, 3]: token, 1 if the slot was active, response tokens so
      far. One array, so that one copy to the host serves all.
    log_prob: float32 [slots], nats under the whole tempered vocabulary.
    log_mu: float32 [slots], nats under the distribution really sampled.
  """

  data: Array
  log_prob: Array
  log_mu: Array

  def slot(self, slot: int) -> tuple[int, bool, int]:
    """Returns (token, valid, length) of one slot."""
    token, valid, length = (int(x) for x in self.data[slot])
    return token, bool(valid), length


class Engine(abc.ABC):
  """Prefill, insert, generate; parameters are an argument of every call."""

  @abc.abstractmethod
  def load_params(self) -> Any:
    """Returns the parameters to pass to `prefill` and `generate`."""

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
      padded_tokens: int32 [T], the prompt padded at the end.
      true_length: tokens that are not padding, at least 1.

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
