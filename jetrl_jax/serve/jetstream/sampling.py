"""How a response is sampled, as a JetStream request says it.

The request has `max_tokens`. The sampler's temperature and seed travel as gRPC
metadata, which any client can send; without them decoding is greedy.
"""

import dataclasses
import json
from collections.abc import Sequence

from jetrl_jax.serve.jetstream.client import SEED, TEMPERATURE
from jetrl_jax.serve.requests import Limits, Sampling


def sampling_of(
    max_tokens: int, metadata: Sequence[tuple[str, str]], limits: Limits
) -> Sampling:
  """Checks how a response is to be sampled.

  Args:
    max_tokens: most tokens of the request.
    metadata: the metadata of the call, (name, value); other names are ignored.
    limits: the limits of the server.

  Raises:
    ValueError: a value is out of range or no number.
  """
  given = {k: v for k, v in metadata if k in (TEMPERATURE, SEED)}
  return Sampling(
      max_tokens=max_tokens,
      temperature=_number(float, TEMPERATURE, given.get(TEMPERATURE, '0')),
      seed=_number(int, SEED, given.get(SEED, '0')),
  ).check(limits)


def to_text(sampling: Sampling) -> str:
  """Returns a text for `from_text`."""
  return json.dumps(dataclasses.asdict(sampling))


def from_text(text: str) -> Sampling:
  """Reads what `to_text` wrote."""
  return Sampling(**json.loads(text))


def _number(kind, name: str, text: str):
  try:
    return kind(text)
  except ValueError:
    raise ValueError(f'{name} is {text!r}, which is no number') from None
