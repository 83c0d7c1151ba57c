"""Tokenised prompts, and the order in which a run meets them."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import numpy as np

from jetrl_jax.data.chat_template import PromptFormat
from jetrl_jax.data.tokenizer import Tokenizer
from jetrl_jax.data.types import Example, Prompt


class PromptDataset:
  """Prompts, tokenised once, without those that are too long.

  Attributes:
    num_filtered: how many examples were longer than `max_prompt_length`.
    fingerprint: SHA-256 (hex) over ids, tokens and answers in order; what a
      saved position is only valid for.
  """

  def __init__(
      self,
      examples: Sequence[Example],
      tokenizer: Tokenizer,
      *,
      prompt_format: PromptFormat,
      max_prompt_length: int,
  ):
    """Applies the template, tokenises and filters.

    Args:
      examples: rows, see `load_examples`.
      tokenizer: the checkpoint's tokenizer.
      prompt_format: chat template or plain text.
      max_prompt_length: longest prompt kept, in tokens, template included.

    Raises:
      ValueError: the template fails, a prompt cannot be tokenised or has no
        token, or none is short enough.
    """
    texts, originals = prompt_format.apply(examples, tokenizer)
    self._prompts: list[Prompt] = []
    shortest = None
    encoded = tokenizer.encode_all(
        texts, add_special_tokens=prompt_format.add_special_tokens
    )
    for example, text, original in zip(examples, texts, originals, strict=True):
      try:
        tokens = next(encoded)
      except ValueError as error:
        raise ValueError(
            f'prompt {example.id} ({example.source}): {error}'
        ) from error
      if not len(tokens):
        raise ValueError(
            f'prompt {example.id} ({example.source}) has no token; a response'
            ' needs at least one to start from.'
        )
      shortest = min(shortest or len(tokens), len(tokens))
      if len(tokens) <= max_prompt_length:
        self._prompts.append(
            Prompt(
                id=example.id,
                tokens=tokens,
                text=text,
                answer=example.answer,
                source=example.source,
                extra={**example.extra, 'prompt': original},
            )
        )
    if not self._prompts:
      raise ValueError(
          f'none of {len(examples)} prompts has at most {max_prompt_length}'
          f' tokens (the shortest has {shortest}); raise max_prompt_length.'
      )
    self.num_filtered = len(examples) - len(self._prompts)
    self.fingerprint = _fingerprint(self._prompts)

  def __len__(self) -> int:
    """Returns the number of prompts kept."""
    return len(self._prompts)

  def __getitem__(self, index: int) -> Prompt:
    """Returns the prompt at `index`, which a `PromptSampler` draws."""
    return self._prompts[index]

  def __iter__(self) -> Iterator[Prompt]:
    """Iterates in the order of the data."""
    return iter(self._prompts)

  def shared_with(self, other: 'PromptDataset') -> list[Prompt]:
    """Returns the prompts of `other` whose tokens a prompt here has, too."""
    known = {prompt.tokens.tobytes() for prompt in self}
    return [prompt for prompt in other if prompt.tokens.tobytes() in known]


def _fingerprint(prompts: Sequence[Prompt]) -> str:
  digest = hashlib.sha256()
  for prompt in prompts:
    text = prompt.answer
    if not isinstance(text, str):
      text = json.dumps(text, sort_keys=True)
    answer = text.encode('utf-8', 'surrogatepass')
    digest.update(np.asarray([prompt.id, prompt.tokens.size], '<i8').tobytes())
    digest.update(prompt.tokens.astype('<i4').tobytes())
    digest.update(np.asarray([len(answer)], '<i8').tobytes() + answer)
  return digest.hexdigest()


def columns_of(prompts: Iterable[Prompt]) -> list[tuple[str, tuple[str, ...]]]:
  """Returns source and column names of the rows, each kind once and sorted."""
  kinds = {(p.source, tuple(sorted(p.extra))) for p in prompts}
  return sorted(kinds)


class PromptSampler:
  """Draws indices of prompts, epoch by epoch; its position can be saved.

  The order of epoch e is the argsort of raw Philox output with the key
  (seed, e): it depends on nothing else, and NumPy keeps raw output stable
  over versions (which it does not for `permutation`).

  Every epoch holds every index once, also where a batch crosses its edge. No
  batch holds an index twice: random keys are addressed by prompt, and a prompt
  met twice in a step would get the same responses twice. An index of the new
  epoch that the batch already holds waits for the next batch.
  """

  def __init__(
      self, *, num_prompts: int, seed: int, shuffle: bool, fingerprint: str
  ):
    """Starts at the first epoch.

    Args:
      num_prompts: size of the data set.
      seed: the seed of the order, in [0, 2^64).
      shuffle: False draws in the order of the data.
      fingerprint: `PromptDataset.fingerprint`.

    Raises:
      ValueError: no prompts, or a seed out of range.
    """
    if num_prompts < 1:
      raise ValueError(f'num_prompts is {num_prompts}; it must be at least 1.')
    if not 0 <= seed < 2**64:
      raise ValueError(f'seed is {seed}; it must be in [0, 2^64).')
    self._identity = {
        'num_prompts': num_prompts,
        'seed': seed,
        'shuffle': shuffle,
        'fingerprint': fingerprint,
    }
    self._epoch = 0
    self._position = 0
    self._waiting: list[int] = []
    self._order = self._order_of(0)

  @property
  def epoch(self) -> int:
    """Epoch of the next index to be drawn, from 0."""
    at_edge = self._position == len(self._order) and not self._waiting
    return self._epoch + at_edge

  def next_batch(self, size: int, exclude: Set[int] = frozenset()) -> list[int]:
    """Draws `size` different indices, into the next epoch where one ends.

    Args:
      size: indices to draw.
      exclude: indices that the batch must not hold, for example those that the
        step has met already; met here, they wait for the next batch.

    Raises:
      ValueError: `size` is below 1 or above the number of prompts.
    """
    left = len(self._order) - len(exclude)
    if not 1 <= size <= left:
      raise ValueError(
          f'a batch of {size} different prompts cannot be drawn from'
          f' {left}; use 1 to {left}.'
      )
    batch: list[int] = []
    waiting: list[int] = []
    for index in self._waiting:
      takes = len(batch) < size and index not in exclude and index not in batch
      (batch if takes else waiting).append(index)
    while len(batch) < size:
      if self._position == len(self._order):
        self._epoch += 1
        self._position = 0
        self._order = self._order_of(self._epoch)
      index = int(self._order[self._position])
      self._position += 1
      waits = index in batch or index in exclude
      (waiting if waits else batch).append(index)
    self._waiting = waiting
    return batch

  def state(self) -> dict[str, Any]:
    """Returns the position, as JSON can hold it."""
    return {
        **self._identity,
        'epoch': self._epoch,
        'position': self._position,
        'waiting': list(self._waiting),
    }

  def restore(self, state: dict[str, Any]) -> None:
    """Continues where `state` was taken.

    Raises:
      ValueError: `state` is of other data, another seed or order, or broken.
    """
    missing = sorted(set(self.state()) - set(state))
    if missing:
      raise ValueError(f'the saved data position lacks {missing}.')
    for name, mine in self._identity.items():
      if state[name] != mine:
        raise ValueError(
            f'the saved data position has {name}={state[name]!r}, this run has'
            f' {mine!r}: it belongs to other data. Use the same files,'
            ' tokenizer, template, max_prompt_length and seed, or a new'
            ' workdir.'
        )
    epoch, position = state['epoch'], state['position']
    waiting = state['waiting']
    size = len(self._order)
    if not (epoch >= 0 and 0 <= position <= size and len(waiting) <= size):
      raise ValueError(
          f'the saved data position is broken: epoch {epoch}, position'
          f' {position} of {size}, {len(waiting)} waiting.'
      )
    self._epoch = epoch
    self._position = position
    self._waiting = list(waiting)
    self._order = self._order_of(epoch)

  def _order_of(self, epoch: int) -> np.ndarray:
    size = self._identity['num_prompts']
    if not self._identity['shuffle']:
      return np.arange(size)
    key = np.array([self._identity['seed'], epoch], np.uint64)
    raw = np.random.Philox(key=key).random_raw(size)
    return np.argsort(raw, kind='stable')
