"""Runs environments in threads during decoding, one thread per call.

A slow call delays only its own episode. The order in which calls end changes
when a slot continues, but never its tokens.
"""

import dataclasses
import math
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import logging

from jetrl_jax.data import Prompt, Tokenizer
from jetrl_jax.rl.rollout.environment import EnvironmentConfig, Outcome
from jetrl_jax.rl.types import EpisodeResult


class StopStrings:
  """Finds the token that completes a turn's first stop string.

  Tokens are decoded one by one, so the result depends only on the tokens and
  not on how many are searched at once.

  Args:
    strings: the stop strings, ASCII.
    tokenizer: the tokens' tokenizer.
  """

  def __init__(self, strings: tuple[str, ...], tokenizer: Tokenizer):
    self._strings, self._tokenizer = strings, tokenizer
    self._longest = max(map(len, strings), default=0)
    self._pieces: dict[int, str] = {}

  def find(self, tokens: np.ndarray, tail: str) -> tuple[int | None, str]:
    """Searches the next tokens of a turn.

    Args:
      tokens: the tokens since the last call.
      tail: the tail that the last call returned; '' at the start of a turn.

    Returns:
      (number of tokens up to the end of the first stop string, or None;
       the tail for the next call).
    """
    pieces = [self._piece(token) for token in tokens.tolist()]
    text = tail + ''.join(pieces)
    # Most texts have no stop string, so the whole text is searched first.
    if any(string in text for string in self._strings):
      text = tail
      for i, piece in enumerate(pieces):
        text += piece
        if any(string in text for string in self._strings):
          return i + 1, ''
    return None, text[max(0, len(text) - self._longest + 1) :]

  def _piece(self, token: int) -> str:
    if token not in self._pieces:
      self._pieces[token] = self._tokenizer.decode(
          [token], skip_special_tokens=False
      )
    return self._pieces[token]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
  """The result of an environment's call.

  Attributes:
    observation: the observation's tokens, int32.
    over: whether the episode has ended.
  """

  observation: np.ndarray
  over: bool


class Episode:
  """One episode: its environment, its calls and its reward so far.

  Args:
    config: the environment and its limits.
    prompt: the episode's prompt.
    rng: the episode's random generator.
    ended: set whenever a call ends.
    vocab_size: rows of the model's embedding.
  """

  def __init__(
      self,
      config: EnvironmentConfig,
      prompt: Prompt,
      rng: np.random.Generator,
      ended: threading.Event,
      vocab_size: int,
  ):
    self.config, self._ended = config, ended
    self._vocab_size = vocab_size
    self.turns, self.reward = 0, 0.0
    self.accuracy: float | None = None
    self.error: str | None = None
    self.over_by_turns = False
    self._end: int | None = None
    self._call = _Call(lambda: self._read(self._reset(prompt, rng)), ended)

  def _reset(self, prompt: Prompt, rng: np.random.Generator) -> Outcome:
    self._environment = self.config.make()
    return Outcome(observation=self._environment.reset(prompt, rng))

  def _read(self, outcome: Any) -> tuple[Outcome, Answer]:
    """Returns an outcome in plain types, and the answer that it gives.

    This runs in the call's thread, so errors from bad values and the time for a
    huge observation count for the environment's call.
    """
    if not isinstance(outcome, Outcome):
      raise ValueError(f'step returned {outcome!r}, which is not an Outcome')
    accuracy = outcome.accuracy
    outcome = Outcome(
        observation=outcome.observation,
        reward=float(outcome.reward),
        done=bool(outcome.done),
        accuracy=None if accuracy is None else float(accuracy),
    )
    over = outcome.done or self.turns >= self.config.max_turns
    tokens = self.config.observation_tokens('' if over else outcome.observation)
    # Otherwise a chat template's turn mark would stand there twice.
    if len(tokens) and tokens[0] == self._end:
      tokens = tokens[1:]
    # A gather would silently take the embedding's last row.
    if len(tokens) and (largest := int(tokens.max())) >= self._vocab_size:
      raise ValueError(
          f'the observation has the token id {largest}; allowed: 0 to'
          f" {self._vocab_size - 1}, the rows of the model's embedding"
      )
    return outcome, Answer(observation=tokens, over=over)

  def step(self, text: str, end: int | None = None) -> None:
    """Sends a turn to the environment; `poll` returns the answer.

    Args:
      text: the turn.
      end: the end token that the turn already has; an observation in whose
        template it comes first does not repeat it. None after a stop string.
    """
    self.turns += 1
    self._end = end
    self._call = _Call(
        lambda: self._read(self._environment.step(text)), self._ended
    )

  def answered(self) -> bool:
    """Whether the last call has ended or timed out."""
    return self._call.done or self._late()

  @property
  def asked_at(self) -> float:
    """The start of the last call, monotonic seconds."""
    return self._call.since

  def _late(self) -> bool:
    return self._call.seconds() >= self.config.timeout_s

  def finish_reason(self) -> str:
    """Returns why the episode ended: 'error', 'turns' or 'stop'."""
    if self.error is not None:
      return 'error'
    return 'turns' if self.over_by_turns else 'stop'

  def poll(self) -> Answer | None:
    """Returns the answer to the last call; None while it still runs."""
    call = self._call
    if not self.answered():
      return None
    # The call's own clock decides, so that the time of polling does not matter.
    if self._late():
      return self._fail('timeout', f'no answer in {self.config.timeout_s} s')
    if call.error is not None:
      # Not str(error), because that may run the environment's code.
      said = traceback.format_exception_only(call.error)
      return self._fail('raised', ''.join(said).strip())
    outcome, answer = call.value
    self.reward += outcome.reward
    if not math.isfinite(self.reward):
      return self._fail('raised', f'the rewards add up to {self.reward}')
    if outcome.accuracy is not None:
      self.accuracy = outcome.accuracy
    self.over_by_turns = answer.over and not outcome.done
    return answer

  def result(self) -> EpisodeResult:
    """Returns the episode's result; reward 0 if its environment failed."""
    if self.error is not None:
      return EpisodeResult(
          reward=0.0, accuracy=0.0, turns=self.turns, error=self.error
      )
    return EpisodeResult(
        reward=self.reward,
        accuracy=self.reward if self.accuracy is None else self.accuracy,
        turns=self.turns,
        error=None,
    )

  def _fail(self, kind: str, why: str) -> Answer:
    logging.log_first_n(
        logging.WARNING,
        'An environment failed, and its episode gets reward 0: %s. Later'
        ' failures are only counted, in reward/environment_*.',
        1,
        why,
    )
    self.error = f'environment_{kind}'
    return Answer(observation=np.zeros(0, np.int32), over=True)


class _Call:
  """A function call in a daemon thread."""

  def __init__(self, function: Callable[[], Any], ended: threading.Event):
    self.since, self.done = time.monotonic(), False
    self.value: Any = None
    self.error: BaseException | None = None
    self._ended_at = math.inf
    self._function, self._ended = function, ended
    threading.Thread(target=self._run, daemon=True).start()

  def _run(self) -> None:
    try:
      self.value = self._function()
    # SystemExit too: an environment's error may only end its episode.
    except BaseException as error:
      self.error = error
    self._ended_at = time.monotonic()
    self.done = True
    self._ended.set()

  def seconds(self) -> float:
    """Returns the duration of the call, so far if it still runs."""
    return min(self._ended_at, time.monotonic()) - self.since
