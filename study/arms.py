"""The arms of the study: which settings each of them has.

Everything that an arm does not name is the same in all arms, and so are, for
one seed, the start, the order of prompts and every random key.
"""

import dataclasses
from collections.abc import Mapping

# FP8 in every arm but those of `head`: scales per row and channel, from the
# values themselves. Delayed scales are calibrated at the start, on one or on
# both sides: an arm would differ from another by more than what it is named
# after.
FP8 = 'fp8_token'
# The positive control's formats, and one more should INT4 not fail.
BITS = ('e4m3', 'e5m2', 'int6', 'int4', 'int3')
# What may weigh INT4's mismatch, see `algorithm.rollout_is`.
CORRECTIONS = ('token', 'icepop', 'mis', 'acr')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
  """One way to run.

  Attributes:
    name: of its folder and in figures.
    train: recipe of training.
    rollout: recipe of the rollout.
    settings: config names and values that make the arm.
    is_long: whether answers have about 2000 tokens instead of 256.
  """

  name: str
  train: str
  rollout: str
  settings: Mapping[str, object]
  is_long: bool = False

  @property
  def is_mixed(self) -> bool:
    """Whether the two sides compute in different recipes."""
    return self.train != self.rollout


def _unified(name: str, recipe: str, flow: str = 'jetrl') -> Arm:
  settings = {'flow': flow, 'precision.recipe': recipe}
  return Arm(name=name, train=recipe, rollout=recipe, settings=settings)


def _mixed(name: str, train: str, rollout: str) -> Arm:
  """Uncorrected: pi_old is training's own, nothing weighs the mismatch."""
  settings = {
      'precision.recipe': train,
      'precision.rollout_recipe': rollout,
      'algorithm.old_logprobs': 'recompute',
  }
  if train == 'bf16':
    settings['flow'] = 'fp8_rollout'
  return Arm(name=name, train=train, rollout=rollout, settings=settings)


_TWO_BY_TWO = (
    _unified('bf16', 'bf16', 'bf16'),
    _mixed('fp8_rollout', 'bf16', FP8),
    _mixed('fp8_training', FP8, 'bf16'),
    _unified('jetrl', FP8),
)
_EXACTNESS = (
    _unified('bf16_inexact', 'bf16', 'bf16_inexact'),
    _unified('jetrl_inexact', FP8, 'jetrl_inexact'),
)
# The product's default recipe, and the same with its head in FP8: for untied
# embeddings, see `study/untie.py`.
_DELAYED = _unified('delayed', 'fp8_delayed')
_HEAD = (
    _DELAYED,
    dataclasses.replace(
        _DELAYED,
        name='delayed_head8',
        settings={**_DELAYED.settings, 'precision.quantize_lm_head': True},
    ),
)
_CONTROL = tuple(
    arm
    for bits in BITS
    for arm in (
        _mixed(f'mixed_{bits}', 'bf16', f'fake_{bits}'),
        _unified(f'unified_{bits}', f'fake_{bits}'),
    )
)


def _corrected(rollout_is: str) -> Arm:
  """The mixed arm of INT4 with its mismatch weighed."""
  arm = _mixed('', 'bf16', 'fake_int4')
  settings = {k: v for k, v in arm.settings.items() if k != 'flow'}
  settings['algorithm.rollout_is'] = rollout_is
  return dataclasses.replace(
      arm, name=f'mixed_int4_{rollout_is}', settings=settings
  )


_CORRECTIONS = tuple(map(_corrected, CORRECTIONS))


def _long(arm: Arm) -> Arm:
  return dataclasses.replace(arm, name=f'{arm.name}_long', is_long=True)


_SHORT = (*_TWO_BY_TWO, *_EXACTNESS, *_HEAD, *_CONTROL, *_CORRECTIONS)
ARMS = {arm.name: arm for arm in (*_SHORT, *map(_long, _SHORT))}
GROUPS = {
    '2x2': tuple(arm.name for arm in _TWO_BY_TWO),
    'exactness': tuple(arm.name for arm in _EXACTNESS),
    # INT3 only if asked for by name.
    'control': tuple(a.name for a in _CONTROL if not a.name.endswith('int3')),
    'corrections': tuple(arm.name for arm in _CORRECTIONS),
    'head': ('bf16', *(arm.name for arm in _HEAD)),
}
GROUPS |= {
    f'{group}_long': tuple(f'{name}_long' for name in names)
    for group, names in GROUPS.items()
}
# Pairs whose difference answers a question: (arm, what it is compared with).
PAIRS = (
    ('fp8_rollout', 'bf16'),
    ('fp8_training', 'bf16'),
    ('jetrl', 'bf16'),
    ('jetrl', 'fp8_rollout'),
    ('jetrl', 'jetrl_inexact'),
    ('bf16', 'bf16_inexact'),
    ('delayed', 'bf16'),
    ('delayed_head8', 'bf16'),
    ('delayed_head8', 'delayed'),
    *((f'mixed_{bits}', f'unified_{bits}') for bits in BITS),
    *(
        (f'mixed_int4_{kind}', other)
        for other in ('mixed_int4', 'unified_int4')
        for kind in CORRECTIONS
    ),
)
PAIRS += tuple((f'{a}_long', f'{b}_long') for a, b in PAIRS)


def named(names: list[str]) -> list[Arm]:
  """Returns arms by their names and those of groups, each once.

  Raises:
    ValueError: a name is neither.
  """
  found: dict[str, Arm] = {}
  for name in names:
    if name not in ARMS and name not in GROUPS:
      raise ValueError(
          f'arm {name!r} is unknown; allowed: {", ".join(GROUPS)} and'
          f' {", ".join(ARMS)}'
      )
    for one in GROUPS.get(name, (name,)):
      found[one] = ARMS[one]
  return list(found.values())
