"""The arms of the study: which settings each of them has.

Everything that an arm does not name is the same in all arms of its cell, and so
are, for one seed, the start, the order of prompts and every random key. The
cells of docs/study.md are `gsm8k`, `math`, `stress`, `sums`, `sums_stress` and
`sums_four`; the arms of `toy` are those of docs/study_toy.md.
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
class Cell:
  """What all arms of a cell share.

  Attributes:
    name: of the cell.
    config: its config file.
    settings: what differs from that file, by config name.
    seeds: on a real model, the arms of the cell in the order in which they are
      run, and how many seeds of each the design asks for.
    compares_final: whether the design compares final accuracy, and not the mean
      over the evaluations after step 50.
  """

  name: str
  config: str
  settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
  seeds: Mapping[str, int] = dataclasses.field(default_factory=dict)
  compares_final: bool = False


TOY = Cell(name='toy', config='configs/study.py')
# Held-out accuracy is greedy, and measured in BF16 as well.
_EVERY = {
    'trainer.val_recipes': ('bf16',),
    'trainer.save_rollouts': False,
    # A run ends with a checkpoint and an export; until then it keeps none.
    'trainer.save_freq': 0,
    'trainer.keep_latest': 1,
    'trainer.keep_best': 0,
}
_FIRST = ('jetrl', 'bf16', 'fp8_rollout')
_FURTHER = ('flashrl', 'jetrl_block', 'qurl', 'jetrl_inexact', 'bf16_inexact')
GSM8K = Cell(
    name='gsm8k',
    config='configs/qwen0_5b.py',
    settings=_EVERY,
    seeds=dict.fromkeys(_FIRST, 5) | dict.fromkeys(_FURTHER, 3),
)
STRESS = Cell(
    name='stress',
    config='configs/qwen0_5b.py',
    settings={
        **_EVERY,
        'optim.lr': 1e-5,
        'trainer.total_training_steps': 100,
    },
    seeds=dict.fromkeys(_FIRST, 3),
)
MATH = Cell(
    name='math',
    config='configs/qwen0_5b.py',
    settings={
        **_EVERY,
        'data.train_files': ('data/math_train.jsonl',),
        'data.val_files': ('data/math500.jsonl',),
        'rollout.max_response_length': 2048,
        # Four updates of 16 prompts, whose bits are all compared.
        'trainer.mini_batch_size': 16,
        'trainer.measure_mismatch': 'all',
        'trainer.micro_batch_size': 16,
        'trainer.total_training_steps': 60,
        'trainer.test_freq': 10,
    },
    seeds=dict.fromkeys(_FIRST, 3),
    compares_final=True,
)
SUMS = Cell(
    name='sums',
    config='configs/smollm2_135m.py',
    settings=_EVERY,
    seeds=dict.fromkeys((*_FIRST, 'flashrl'), 10),
    compares_final=True,
)
SUMS_STRESS = dataclasses.replace(
    SUMS, name='sums_stress', settings={**_EVERY, 'optim.lr': 5e-5}
)
# Four updates of 4 prompts a rollout, whose bits are all compared.
SUMS_FOUR = dataclasses.replace(
    SUMS,
    name='sums_four',
    settings={
        **_EVERY,
        'trainer.mini_batch_size': 4,
        'trainer.measure_mismatch': 'all',
    },
    seeds=dict.fromkeys((*_FIRST, 'int8', 'fake_e4m3'), 10),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
  """One way to run.

  Attributes:
    name: of its folder and in figures.
    train: recipe of training.
    rollout: recipe of the rollout.
    settings: config names and values that make the arm.
    is_long: of the toy: whether answers have about 2000 tokens instead of 256.
    cell: what it shares with other arms.
    seeds: those that the design asks for; none if it does not say.
  """

  name: str
  train: str
  rollout: str
  settings: Mapping[str, object]
  is_long: bool = False
  cell: Cell = TOY
  seeds: tuple[int, ...] = ()

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


def _of_cell(cell: Cell) -> tuple[Arm, ...]:
  """Returns the arms of a cell on a real model, in the order of the design."""
  plain = {'precision.kv_cache_dtype': 'compute'}
  mixed = {
      'flow': 'fp8_rollout',
      'algorithm.old_logprobs': 'recompute',
      **plain,
  }
  arms = {
      'jetrl': _unified('', 'fp8_delayed'),
      'bf16': _unified('', 'bf16', 'bf16'),
      'fp8_rollout': _mixed('', 'bf16', FP8),
      'flashrl': _mixed('', 'bf16', FP8),
      'jetrl_block': _unified('', 'fp8_block'),
      'qurl': _mixed('', 'bf16', FP8),
      'jetrl_inexact': _unified('', 'fp8_delayed', 'jetrl_inexact'),
      'bf16_inexact': _unified('', 'bf16', 'bf16_inexact'),
      'int8': _unified('', 'int8'),
      'fake_e4m3': _unified('', 'fake_e4m3'),
  }
  more = {
      'bf16': plain,
      'bf16_inexact': plain,
      'fp8_rollout': mixed,
      'flashrl': {**mixed, 'flow': 'flashrl'},
      'qurl': {**mixed, 'flow': 'qurl'},
  }
  return tuple(
      dataclasses.replace(
          arms[name],
          name=f'{cell.name}_{name}',
          cell=cell,
          settings={**arms[name].settings, **more.get(name, {})},
          seeds=tuple(range(1, count + 1)),
      )
      for name, count in cell.seeds.items()
  )


_REAL = {
    cell.name: _of_cell(cell)
    for cell in (GSM8K, MATH, STRESS, SUMS, SUMS_STRESS, SUMS_FOUR)
}
_SHORT = (*_TWO_BY_TWO, *_EXACTNESS, *_HEAD, *_CONTROL, *_CORRECTIONS)
ARMS = {
    arm.name: arm
    for arm in (
        *(arm for arms in _REAL.values() for arm in arms),
        *_SHORT,
        *map(_long, _SHORT),
    )
}
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
GROUPS |= {
    name: tuple(arm.name for arm in arms) for name, arms in _REAL.items()
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
PRIMARY = ('gsm8k_jetrl', 'gsm8k_bf16')
# Holm's correction is over these.
SECONDARY = (
    ('gsm8k_fp8_rollout', 'gsm8k_bf16'),
    ('gsm8k_flashrl', 'gsm8k_bf16'),
    ('gsm8k_qurl', 'gsm8k_bf16'),
    ('gsm8k_jetrl_block', 'gsm8k_bf16'),
    ('gsm8k_jetrl', 'gsm8k_fp8_rollout'),
    ('gsm8k_jetrl', 'gsm8k_jetrl_inexact'),
    ('gsm8k_bf16', 'gsm8k_bf16_inexact'),
)
# Of the other cells: reported with their intervals, and deciding nothing.
DESCRIBED = tuple(
    (f'{cell.name}_{ours}', f'{cell.name}_{others}')
    for cell in (MATH, STRESS, SUMS, SUMS_STRESS, SUMS_FOUR)
    for ours, others in (
        ('jetrl', 'bf16'),
        ('fp8_rollout', 'bf16'),
        ('flashrl', 'bf16'),
        ('jetrl', 'fp8_rollout'),
        ('int8', 'bf16'),
        ('fake_e4m3', 'bf16'),
    )
    if {ours, others} <= set(cell.seeds)
)


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


def runs_of(names: list[str], seeds: list[int]) -> list[tuple[Arm, int]]:
  """Returns what to run: the arms of each seed, in the order of the names.

  Of a group an arm has the seeds that the design asks for. An arm that is
  named by itself has any: beyond the design it is exploratory.

  Args:
    names: of arms and groups.
    seeds: of runs.

  Raises:
    ValueError: a name is neither, or no arm has one of the seeds.
  """
  arms = named(names)
  found = [
      (arm, seed)
      for seed in seeds
      for arm in arms
      if arm.name in names or not arm.seeds or seed in arm.seeds
  ]
  if not found:
    raise ValueError(
        f'--seeds={",".join(map(str, seeds))}: no arm of'
        f' --arms={",".join(names)} has one of these by the design; it has'
        f' {", ".join(map(str, sorted({s for a in arms for s in a.seeds})))}.'
        f' Name an arm by itself to run any seed, such as'
        f' --arms={arms[0].name}'
    )
  return found
