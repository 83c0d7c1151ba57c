"""What the guard remembers from step to step.

It is part of a checkpoint: the decision behind a step is saved with that step
and carried out before the next one, so that a run that is killed and resumed
does the same, and whoever reads a checkpoint knows its precision.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Action:
  """What is to be done before the next step.

  Attributes:
    name: one of `settings.GUARD_ACTIONS`.
    dots: of 'high_precision': paths of dots.
    step: of 'rollback': that of the checkpoint; 0 for the others.
  """

  name: str
  dots: tuple[str, ...] = ()
  step: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardState:
  """What the guard remembers; a part of every checkpoint.

  Attributes:
    over: steps in a row over a bound, since the last action.
    within: steps in a row within all bounds.
    recalibrated: scales were measured anew, and the steps since then were not
      `patience` in a row within all bounds.
    high_precision: dots that actions have put into high precision.
    rollbacks: done so far.
    candidate: the newest step that was saved within all bounds, which the step
      behind it has yet to confirm; 0 is none.
    good: the newest saved step that was confirmed; 0 is none.
    due: decided and not yet done.
  """

  over: int = 0
  within: int = 0
  recalibrated: bool = False
  high_precision: tuple[str, ...] = ()
  rollbacks: int = 0
  candidate: int = 0
  good: int = 0
  due: Action | None = None

  def to_json(self) -> dict[str, Any]:
    """Returns what `from_json` reads, as JSON has it: without tuples."""
    saved = dataclasses.asdict(self)
    saved['high_precision'] = list(self.high_precision)
    if self.due is not None:
      saved['due']['dots'] = list(self.due.dots)
    return saved

  @classmethod
  def from_json(cls, saved: Mapping[str, Any]) -> 'GuardState':
    """Returns what was saved."""
    due = saved['due']
    if due is not None:
      due = Action(**due | {'dots': tuple(due['dots'])})
    dots = tuple(saved['high_precision'])
    return cls(**dict(saved) | {'high_precision': dots, 'due': due})

  def done(self) -> 'GuardState':
    """Returns the state behind the action that was due."""
    action = self.due
    assert action is not None
    return dataclasses.replace(
        self,
        due=None,
        recalibrated=self.recalibrated or action.name == 'recalibrate',
        high_precision=self.high_precision + action.dots,
        rollbacks=self.rollbacks + (action.name == 'rollback'),
    )


def of_checkpoint(host_state: Mapping[str, Any]) -> GuardState:
  """Returns the guard's state of a checkpoint; a run without one has none."""
  if 'guard' not in host_state:
    return GuardState()
  return GuardState.from_json(host_state['guard'])
