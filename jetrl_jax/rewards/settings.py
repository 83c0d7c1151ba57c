"""What a run's rewards are set to."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig:
  """From answers to scores.

  Attributes:
    functions: terms of the score: 'math', 'gsm8k', 'format', or
      'package.module.function' / 'file.py:function' with verl's or TRL's
      signature.
    weights: factor of each term in the sum that is the score.
    kwargs: keyword arguments by term, as JSON: ('', '{"pattern": "..."}').
    num_workers: processes that score at the same time.
    timeout_s: wall seconds per answer; the worker is killed past it.
    memory_limit_mb: address space that an answer may add, in MiB.
  """

  functions: tuple[str, ...] = ('math',)
  weights: tuple[float, ...] = (1.0,)
  kwargs: tuple[str, ...] = ('',)
  num_workers: int = 2
  timeout_s: float = 5.0
  memory_limit_mb: int = 2048

  @property
  def limits(self) -> dict[str, Any]:
    """What `RewardPool` takes besides the terms of the score."""
    names = 'num_workers', 'timeout_s', 'memory_limit_mb'
    return {name: getattr(self, name) for name in names}
