"""The limits of a request, and how its response is sampled."""

import dataclasses
from collections.abc import Sequence

from jetrl_jax.data import (
    ChatFormat,
    ChatRenderer,
    Example,
    PlainFormat,
    PromptFormat,
    Tokenizer,
)
from jetrl_jax.data.types import Message
from jetrl_jax.rl.settings import MAX_TEMPERATURE, MIN_TEMPERATURE

# The largest number that messages and gRPC's options hold.
_INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """The limits of a server.

  Attributes:
    max_prompt_length: tokens, the template's included.
    max_tokens: response tokens of one request, the stop token included.
    queue_size: requests that may wait while all slots are taken.
    max_message_kib: size of one request.
  """

  max_prompt_length: int
  max_tokens: int
  queue_size: int = 256
  max_message_kib: int = 1024

  def __post_init__(self):
    allowed = {
        'max_prompt_length': (1, _INT32),
        'max_tokens': (1, _INT32),
        'queue_size': (0, _INT32),
        # With less, not even the refusal of a request fits.
        'max_message_kib': (1, _INT32 >> 10),
    }
    for name, (least, most) in allowed.items():
      if not least <= getattr(self, name) <= most:
        raise ValueError(
            f'{name} is {getattr(self, name)}; allowed: {least} to {most}'
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """How one response is sampled.

  Attributes:
    max_tokens: response tokens after which it ends, the stop token included.
    temperature: 0 is greedy.
    seed: the same seed gives the same tokens, whatever else is being served.
    top_p: sample from the fewest most probable tokens whose probabilities add
      up to this; 1 is off.
  """

  max_tokens: int
  temperature: float = 0.0
  seed: int = 0
  top_p: float = 1.0

  def check(self, limits: Limits) -> 'Sampling':
    """Returns itself.

    Raises:
      ValueError: a value is out of range.
    """
    if not 1 <= self.max_tokens <= limits.max_tokens:
      raise ValueError(
          f'max_tokens is {self.max_tokens}; allowed: 1 to {limits.max_tokens}'
      )
    if (
        self.temperature
        and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE
    ):
      raise ValueError(
          f'temperature is {self.temperature}; allowed: {MIN_TEMPERATURE} to'
          f' {MAX_TEMPERATURE}, or 0 for greedy'
      )
    if not 0 <= self.seed < 2**32:
      raise ValueError(f'seed is {self.seed}; allowed: 0 to 2^32 - 1')
    if not 0 < self.top_p <= 1:
      raise ValueError(
          f'top_p is {self.top_p}; allowed: above 0, up to 1, which is off'
      )
    return self


class PromptReader:
  """Turns the prompt of a request into tokens, within the limits.

  Args:
    tokenizer: the tokenizer of the policy.
    prompt_format: what is put around a prompt that comes as text.
    limits: the limits of the server.
    vocab_size: rows of the model's embedding.
  """

  def __init__(
      self,
      tokenizer: Tokenizer,
      prompt_format: PromptFormat,
      limits: Limits,
      vocab_size: int,
  ):
    self._tokenizer, self._format = tokenizer, prompt_format
    self._limits, self._vocab_size = limits, vocab_size
    self._render: ChatRenderer | None = None
    # Without a template `apply` says so.
    if isinstance(prompt_format, ChatFormat) and tokenizer.chat_template:
      variables = tokenizer.template_variables | prompt_format.variables
      self._render = ChatRenderer(tokenizer.chat_template, variables)

  def close(self) -> None:
    """Ends the process that renders the chat template."""
    if self._render is not None:
      self._render.close()

  def of_text(self, text: str) -> list[int]:
    """Returns the tokens of a question in the policy's prompt format.

    Raises:
      ValueError: the text is empty, cannot be tokenised, or is too long.
    """
    if not text:
      raise ValueError('the prompt is empty; send some text')
    return self._formatted(text)

  def of_messages(self, messages: list[Message]) -> list[int]:
    """Returns the tokens of a conversation in the policy's prompt format.

    Where the policy has no chat template, a single message of the user is put
    into its plain template.

    Raises:
      ValueError: the template takes no such conversation, or it is too long.
    """
    plain = isinstance(self._format, PlainFormat)
    if plain and [message['role'] for message in messages] == ['user']:
      return self.of_text(messages[0]['content'])
    if plain:
      raise ValueError(
          'this policy has no chat template: it takes one message of the user;'
          f' found {[message["role"] for message in messages]}'
      )
    return self._formatted(messages)

  def of_raw_text(self, text: str) -> list[int]:
    """Returns the tokens of a text without a template.

    What the tokenizer puts around a text (Llama's BOS) is there.

    Raises:
      ValueError: the text cannot be tokenised, or is too long.
    """
    tokens = self._tokenizer.encode(text, add_special_tokens=True)
    return self._within_limits(tokens.tolist())

  def _formatted(self, prompt: str | list[Message]) -> list[int]:
    example = Example(id=0, prompt=prompt, answer='', source='', extra={})
    if self._render is not None and isinstance(self._format, ChatFormat):
      full = self._render(self._format.messages(example))
    else:
      (full,), _ = self._format.apply([example], self._tokenizer)
    tokens = self._tokenizer.encode(
        full, add_special_tokens=self._format.add_special_tokens
    )
    return self._within_limits(tokens.tolist())

  def of_tokens(self, tokens: Sequence[int]) -> list[int]:
    """Returns token ids as they are: no template, no special tokens.

    Raises:
      ValueError: there is none, an id is not in the vocabulary, or there are
        too many.
    """
    outside = [t for t in tokens if not 0 <= t < self._vocab_size]
    if outside:
      raise ValueError(
          f'token ids {outside[:5]} are not in the vocabulary; allowed: 0 to'
          f' {self._vocab_size - 1}'
      )
    return self._within_limits(list(tokens))

  def _within_limits(self, tokens: list[int]) -> list[int]:
    if not 1 <= len(tokens) <= self._limits.max_prompt_length:
      raise ValueError(
          f'the prompt has {len(tokens)} tokens; allowed: 1 to'
          f' {self._limits.max_prompt_length}'
      )
    return tokens
