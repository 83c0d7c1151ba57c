"""The records that data/ hands out: rows as read, and prompts."""

import dataclasses
from typing import Any, TypeAlias

import numpy as np

# One turn of a conversation: {'role': 'user', 'content': '...'}.
Message: TypeAlias = dict[str, Any]
# A number is kept as its text. A bool, a list or an object is for reward
# functions that expect one.
Answer: TypeAlias = str | bool | list[Any] | dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
  """One row of a data set, before any template.

  Attributes:
    id: address of the row in the run's data, unique, in [0, 2^31).
    prompt: the question, or a conversation to be continued.
    answer: the reference answer, '' where there is none; for a GSM8K solution
      what follows '####', for a column of JSON objects or lists the value.
    source: name of the data set, e.g. 'gsm8k'.
    extra: all columns of the row, unchanged, under their own names.
  """

  id: int
  prompt: str | list[Message]
  answer: Answer
  source: str
  extra: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """A tokenised prompt, on the host.

  Attributes:
    id: address of the prompt in the data set; part of every random key.
    tokens: int32 [prompt_length], at least one token.
    text: what was tokenised (template applied).
    answer: the reference answer that the reward compares with, '' where there
      is none; a JSON value that is no text as it is in the row.
    source: name of the data set, e.g. 'gsm8k'.
    extra: the row's columns, for custom reward functions; 'prompt' is the
      conversation (a chat template) or the text (a plain template).
  """

  id: int
  tokens: np.ndarray
  text: str
  answer: Answer
  source: str
  extra: dict[str, Any]
