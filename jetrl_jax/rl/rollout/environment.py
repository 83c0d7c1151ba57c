"""The environment interface: turns of text inside a rollout.

An episode is one sample of one prompt. The policy writes a turn and the
environment answers with an observation, until the environment is done or a
limit is reached. Observations become tokens of the same response: the decode
step feeds them like sampled tokens, and the loss masks them.

References:
  The two methods and their meanings: Gym, arXiv:1606.01540.
"""

import abc
import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from jetrl_jax.core.files import import_file, user_path
from jetrl_jax.data import Prompt, Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """An environment's answer to a turn.

  Attributes:
    observation: text that follows the turn; '' for none. It is ignored if
      `done`.
    reward: a finite number that is added to the episode's reward.
    done: whether the episode has ended.
    accuracy: in [0, 1]; the last one given is the episode's accuracy. If none
      is given, the accuracy is the reward.
  """

  observation: str = ''
  reward: float = 0.0
  done: bool = False
  accuracy: float | None = None

  def __post_init__(self):
    if not isinstance(self.observation, str):
      raise ValueError(
          f'the observation is {self.observation!r}; it must be a string'
      )
    if not math.isfinite(self.reward):
      raise ValueError(f'the reward is {self.reward}; it must be finite')
    if self.accuracy is not None and not 0 <= self.accuracy <= 1:
      raise ValueError(
          f'the accuracy is {self.accuracy}; it must be in [0, 1] or None'
      )


class Environment(abc.ABC):
  """One episode; each episode gets a new instance in the trainer's process.

  Its methods run in threads, but only one at a time for one episode. Episodes
  run in parallel, so they must not share mutable state.
  """

  # ASCII strings, such as '</tool>', that end a turn like a stop token.
  stop_strings: ClassVar[tuple[str, ...]] = ()

  def reset(self, prompt: Prompt, rng: np.random.Generator) -> str:
    """Starts the episode.

    Args:
      prompt: the row of the data set; its tokens already precede the response.
      rng: the episode's only source of randomness, seeded by (seed, step,
        prompt, sample), so that a run is reproducible.

    Returns:
      Text that follows the prompt before the policy's first turn; '' for none.
    """
    del prompt, rng
    return ''

  @abc.abstractmethod
  def step(self, text: str) -> Outcome:
    """Answers a turn.

    Args:
      text: what the policy wrote since the last observation, with the stop
        string that ended it but without a stop token. It is untrusted input.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentSource:
  """Turns inside a rollout (docs/environments.md).

  The score is then the environment's own; of reward.* only overlong_buffer is
  read.

  Attributes:
    name: 'file.py:Class' or 'package.module:Class'; '' is one turn, scored by
      reward.*.
    kwargs: keyword arguments of the class, as JSON.
  """

  name: str = ''
  kwargs: str = ''


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
  """The environment of a run, and its limits.

  Attributes:
    make: makes the environment of one episode.
    tokenizer: the tokenizer of the policy.
    max_turns: turns of the policy after which an episode is over.
    timeout_s: wall seconds for one call of the environment; past it the episode
      counts 0.
    observation_template: what becomes of an observation, with '{observation}'
      in it; a chat template's turn marks go here.
  """

  make: Callable[[], Environment]
  tokenizer: Tokenizer
  max_turns: int = 8
  timeout_s: float = 10.0
  observation_template: str = '{observation}'

  def __post_init__(self):
    """Makes one environment, so that a broken one fails at the start."""
    if self.max_turns < 1:
      raise ValueError(f'max_turns is {self.max_turns}; it must be >= 1')
    if not self.timeout_s > 0:
      raise ValueError(f'timeout_s is {self.timeout_s}; it must be > 0')
    if '{observation}' not in self.observation_template:
      raise ValueError(
          f'observation_template is {self.observation_template!r}; it must'
          " hold '{observation}'"
      )
    strings = self.make().stop_strings
    if not isinstance(strings, (tuple, list)):
      # In a plain string, every letter would count as a stop string.
      raise ValueError(
          f'stop_strings is {strings!r}; allowed: a tuple of strings, such as'
          " ('</tool>',)"
      )
    for string in strings:
      # Two tokens may share the bytes of a character that is not ASCII.
      if not (isinstance(string, str) and string and string.isascii()):
        raise ValueError(
            f'stop_strings has {string!r}; allowed: ASCII strings of at least'
            ' one character'
        )

  @property
  def stop_strings(self) -> tuple[str, ...]:
    """Strings that end a turn."""
    return tuple(self.make().stop_strings)

  def observation_tokens(self, observation: str) -> np.ndarray:
    """Returns the int32 ids of an observation in its template; none for ''."""
    if not observation:
      return np.zeros(0, np.int32)
    # Not str.format, because the template may contain other braces.
    text = self.observation_template.replace('{observation}', observation)
    return self.tokenizer.encode(text, add_special_tokens=False)


def load_environment(name: str) -> Callable[..., Environment]:
  """Imports an environment's class.

  Args:
    name: 'file.py:Class' or 'package.module:Class'.

  Raises:
    ValueError: the file, module or class does not exist, or the class is not an
      `Environment`.
  """
  where, colon, what = name.rpartition(':')
  if not (colon and where and what.isidentifier()):
    raise ValueError(
        f"environment.name is {name!r}; write 'file.py:Class' or"
        " 'package.module:Class'"
    )
  is_file = where.endswith('.py')
  if is_file and not user_path(where).is_file():
    raise ValueError(
        f'environment.name {name!r}: there is no file'
        f' {user_path(where).absolute()}'
    )
  try:
    load = import_file if is_file else importlib.import_module
    module = load(where)
  # SystemExit too: of a script that reads its own command line.
  except (Exception, SystemExit) as error:
    raise ValueError(
        f'environment.name {name!r}: importing {where!r} failed with'
        f' {type(error).__name__}: {error}'
    ) from error
  classes = {
      key: value
      for key, value in vars(module).items()
      if inspect.isclass(value)
      and issubclass(value, Environment)
      and not inspect.isabstract(value)
  }
  if what not in classes:
    raise ValueError(
        f'environment.name {name!r}: {where!r} has no class {what!r} that'
        f' implements Environment; it has {sorted(classes)}'
    )
  return classes[what]
