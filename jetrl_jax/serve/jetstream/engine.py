"""Our engine as a subclass of JetStream's, and our tokenizer as one of its.

Nothing is computed here: the arrays, and so the tokens, are those of
`rl.rollout.Engine`, which serves rollouts too.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jetrl_jax.core import sharding
from jetrl_jax.data import Tokenizer
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.rl.rollout.engine import DecodeState, Engine, Prefix
from jetrl_jax.serve.jetstream.shim import (
    engine_api,
    token_utils,
    tokenizer_api,
    tokenizer_pb2,
)
from jetrl_jax.serve.requests import Sampling


class PromptTokens(np.ndarray):
  """The tokens of a prompt that know how their response is sampled.

  JetStream's `prefill` is handed an array and nothing else of the request.

  Attributes:
    sampling: the sampling settings of the request.
  """

  sampling: Sampling

  @classmethod
  def make(cls, tokens: list[int], sampling: Sampling) -> 'PromptTokens':
    """Returns int32 [T] with its sampling."""
    array = np.asarray(tokens, np.int32).view(cls)
    array.sampling = sampling
    return array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedPrefix:
  """A prefilled prompt on its way to a slot.

  Attributes:
    prefix: its caches.
    sampling: the sampling settings of the request.
  """

  prefix: Prefix
  sampling: Sampling = dataclasses.field(metadata={'static': True})


class JetStreamEngine(engine_api.Engine):
  """JetStream's Engine API (0.2.2) over our engine.

  Args:
    engine: with its parameters set.
    tokenizer: the tokenizer of the policy.
  """

  def __init__(self, engine: Engine, tokenizer: Tokenizer):
    self._engine, self._tokenizer = engine, tokenizer

  def load_params(self, *args, **kwargs) -> PolicyParams:
    """Returns the parameters; JetStream asks once, at its start."""
    del args, kwargs
    return self._engine.load_params()

  def init_decode_state(self, *args, **kwargs) -> DecodeState:
    """Returns a state with every slot idle."""
    del args, kwargs
    return self._engine.init_decode_state()

  def prefill(
      self,
      *,
      params: PolicyParams,
      existing_prefix: Any = None,
      padded_tokens: np.ndarray | jax.Array,
      true_length: int,
  ) -> ServedPrefix:
    """Computes the cache of one prompt.

    Args:
      params: what `load_params` returned.
      existing_prefix: must be None: prefixes are not continued.
      padded_tokens: int32 [T]; `PromptTokens`, or any array, whose response is
        then greedy and as long as the engine allows.
      true_length: tokens that are not padding, at least 1.
    """
    if existing_prefix is not None:
      raise ValueError('existing_prefix is given; prefixes are not continued')
    if isinstance(padded_tokens, PromptTokens):
      sampling = padded_tokens.sampling
    else:
      longest = self._engine.config.max_response_length
      sampling = Sampling(max_tokens=longest)
    tokens = np.asarray(padded_tokens)[:true_length]
    prefix = self._engine.prefill_batch(params, [tokens])
    return ServedPrefix(prefix=prefix, sampling=sampling)

  def insert(
      self, prefix: ServedPrefix, decode_state: DecodeState, slot: int
  ) -> DecodeState:
    """Starts a response in a slot; the state given is donated."""
    sampling = prefix.sampling
    return self._engine.bulk_insert(
        prefix.prefix,
        decode_state,
        [slot],
        # The address of its randomness: prompt `seed`, sample 0.
        address=np.asarray([[sampling.seed, 0]], np.uint32),
        limits=[sampling.max_tokens],
        temperature=sampling.temperature,
    )

  def generate(self, params: PolicyParams, decode_state: DecodeState):
    """Takes one step in all slots; returns (state, JetStream's ResultTokens).

    The last step of a response has it all: the slot is not valid any more in
    the next one, and that is how JetStream learns that it has ended.
    """
    state, data = self._engine.generate(params, decode_state)
    return state, engine_api.ResultTokens(
        data=data,
        tokens_idx=(0, 1),
        valid_idx=(1, 2),
        length_idx=(2, 3),
        samples_per_slot=1,
    )

  def get_prefix_destination_sharding(self) -> NamedSharding:
    """Returns where prefixes lie; prefill and decode share the devices."""
    return NamedSharding(self._engine.mesh, sharding.ROWS)

  def get_tokenizer(self):
    """Returns an empty record: our tokenizer is no SentencePiece file."""
    return tokenizer_pb2.TokenizerParameters(path='', extra_ids=0)

  def build_tokenizer(self, metadata) -> 'JetStreamTokenizer':
    """Returns the policy's own tokenizer."""
    del metadata
    return JetStreamTokenizer(self._tokenizer)

  @property
  def max_concurrent_decodes(self) -> int:
    """Number of slots."""
    return self._engine.num_slots

  @property
  def samples_per_slot(self) -> int:
    """Responses per slot."""
    return 1

  @property
  def max_prefill_length(self) -> int:
    """Longest prompt, in tokens."""
    return self._engine.config.max_prompt_length

  @property
  def mesh(self) -> Mesh:
    """The devices."""
    return self._engine.mesh

  @property
  def colocated_cpus(self) -> None:
    """Unknown."""
    return None


class JetStreamTokenizer(tokenizer_api.Tokenizer):
  """JetStream's Tokenizer API over ours.

  Args:
    tokenizer: from the checkpoint's tokenizer.json.
  """

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer

  def encode(self, s: str, **kwargs):
    """Returns (padded tokens, tokens that are not padding).

    Args:
      s: text; our tokenizer itself adds what belongs around it.
      **kwargs: JetStream's prefill_lengths, max_prefill_length, jax_padding.
    """
    kwargs.pop('is_bos', None)
    return token_utils.pad_tokens(
        self._tokenizer.encode(s, add_special_tokens=True),
        self.bos_id,
        self.pad_id,
        is_bos=False,
        **kwargs,
    )

  def decode(self, token_ids: list[int], **kwargs) -> str:
    """Returns the text of tokens."""
    del kwargs
    return self._tokenizer.decode(token_ids)

  @property
  def pad_id(self) -> int:
    """Id of the padding."""
    return self._tokenizer.pad_id

  @property
  def eos_id(self) -> int:
    """The first id that ends a response."""
    return self._tokenizer.eos_ids[0]

  @property
  def bos_id(self) -> int:
    """Id that starts a text; -1 where the tokenizer has none."""
    bos = self._tokenizer.special_tokens.get('bos_token')
    if bos is None:
      return -1
    return int(self._tokenizer.encode(bos, add_special_tokens=False)[0])

  @property
  def stop_tokens(self) -> set[int]:
    """All ids that end a response; padding is none of them."""
    return set(self._tokenizer.eos_ids)
