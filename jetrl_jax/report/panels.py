"""Which charts the report has: a panel each, by section."""

import dataclasses
import re

from jetrl_jax.report.data import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
  """One chart of a run; in a comparison its first curve, run by run.

  Attributes:
    title: heading.
    curves: (metric, label); the first is the one that runs are compared by.
    band: (lower edge, upper edge) of a band around the first curve: metrics.
    unit, log, smooth, note: see `report_charts.line_chart`.
    absent: when none of the metrics is there: the reason.
    unless: (metric, name) that the first curve is often equal to; where it is
      in all runs, a sentence says so instead.
  """

  title: str
  curves: tuple[tuple[str, str], ...]
  band: tuple[str, str] | None = None
  unit: str = ''
  log: bool = False
  smooth: bool = False
  note: str = ''
  absent: str = 'no line of metrics.jsonl has it'
  unless: tuple[str, str] | None = None


LEARNING = (
    Panel(
        title='Reward',
        curves=(('critic/rewards/mean', 'mean score'),),
        smooth=True,
        note='Of the sampled answers, before the update.',
    ),
    Panel(
        title='Training accuracy',
        curves=(('critic/acc/mean', 'accuracy'),),
        unit='%',
        smooth=True,
        unless=('critic/rewards/mean', 'the reward'),
    ),
    Panel(
        title='Response length',
        curves=(('response_length/mean', 'mean'),),
        band=('response_length/min', 'response_length/max'),
        unit='tokens',
        note='Band: shortest to longest.',
    ),
    Panel(
        title='Answers cut at the length limit',
        curves=(('response_length/clip_ratio', 'share'),),
        unit='%',
    ),
    Panel(
        title='Prompts that teach',
        curves=(('critic/mixed_group_frac', 'share'),),
        unit='%',
        smooth=True,
        note='Groups whose scores differ; the others have no advantage.',
    ),
    Panel(
        title='Turns per episode',
        curves=(('num_turns/mean', 'mean'),),
        band=('num_turns/min', 'num_turns/max'),
        note='Band: fewest to most.',
        absent='',
    ),
    Panel(
        title='Environment',
        curves=(
            ('environment/observation_frac', 'tokens observed'),
            ('environment/turn_limit_frac', 'at the turn limit'),
        ),
        unit='%',
        absent='',
    ),
    Panel(
        title='KL taken off the reward',
        curves=(('critic/kl_penalty/mean', 'mean'),),
        absent='',
    ),
    Panel(title='Warm-start loss', curves=(('sft/loss', 'loss'),), absent=''),
)
FLOW = (
    Panel(
        title='Mismatch: tokens that differ',
        curves=(('training/mismatch_token_frac', 'share of tokens'),),
        unit='%',
        note='Rollout and training log-prob of a token, in any bit; with'
        " trainer.measure_mismatch='first' of the first mini-batch.",
    ),
    Panel(
        title='Mismatch: size',
        curves=(
            ('training/rollout_logprob_diff_max', 'largest'),
            ('training/rollout_logprob_diff_mean', 'mean'),
        ),
        unit='nats',
        log=True,
    ),
    Panel(
        title='Mismatch: KL',
        curves=(('rollout_corr/kl', 'k1'), ('rollout_corr/k3_kl', 'k3')),
        unit='nats',
        note='Of mu, what was sampled, from pi old.',
    ),
)
UPDATE = (
    Panel(
        title='Entropy',
        curves=(('actor/entropy', 'entropy'),),
        unit='nats',
        smooth=True,
    ),
    Panel(
        title='Clipped tokens',
        curves=(
            ('actor/pg_clipfrac', 'clipped'),
            ('actor/pg_clipfrac_lower', 'dual clip'),
        ),
        unit='%',
    ),
    Panel(
        title='KL of the update',
        curves=(('actor/ppo_kl', 'from the rollout policy'),),
        unit='nats',
    ),
    Panel(
        title='KL to the reference',
        curves=(('actor/kl_loss', 'to the reference'),),
        unit='nats',
        absent='only with algorithm.kl_loss_coef > 0',
    ),
    Panel(
        title='Gradient norm',
        curves=(('actor/grad_norm', 'before clipping'),),
        log=True,
        smooth=True,
    ),
    Panel(title='Learning rate', curves=(('actor/lr', 'lr'),)),
    Panel(title='Objective', curves=(('actor/pg_loss', 'loss'),)),
)
SPEED = (
    Panel(
        title='Tokens per second and device',
        curves=(
            ('perf/throughput', 'whole step'),
            ('perf/rollout_throughput', 'rollout'),
        ),
    ),
    Panel(
        title='Model FLOPs utilisation',
        curves=(
            ('perf/mfu/actor', 'update'),
            ('perf/mfu/rollout', 'rollout'),
        ),
        unit='%',
        absent='only on GPUs whose peak is in the table of rl/run/flops.py',
    ),
    Panel(
        title='Memory at the peak',
        curves=(
            ('perf/max_memory_allocated_gb', 'device'),
            ('perf/cpu_memory_used_gb', 'host'),
        ),
        unit='GiB',
    ),
    Panel(
        title='Packing efficiency',
        curves=(('perf/packing_efficiency', 'places with a token'),),
        unit='%',
    ),
)
_NO_FP8 = 'only with FP8 dots, see precision.recipe'
FP8 = (
    Panel(
        title='Weight bytes changed per step',
        curves=(
            ('fp8/changed_weight_bytes/mean', 'mean over kernels'),
            ('fp8/changed_weight_bytes/min', 'least'),
        ),
        unit='%',
        note='FP8 bytes that the update moved: 0 would be no learning.',
        absent=_NO_FP8,
    ),
    Panel(
        title='Weight bytes changed per step, rollout',
        curves=(
            ('rollout_fp8/changed_weight_bytes/mean', 'mean over kernels'),
            ('rollout_fp8/changed_weight_bytes/min', 'least'),
        ),
        unit='%',
        note='Of the weights that a mixed flow samples with.',
        absent='',
    ),
)
OPERANDS = (
    ('input', 'inputs'),
    ('kernel', 'kernels'),
    ('output_grad', 'output gradients'),
)
# measure, title, unit, log, which value of several dots or steps is shown.
MAPS = (
    ('saturated_frac', 'Saturated', '%', True, 'max'),
    ('flushed_frac', 'Flushed to zero', '%', True, 'max'),
    ('sqnr_db', 'Signal to noise', 'dB', False, 'min'),
)
# In a comparison, where the maps of every dot would be too many.
FP8_WORST = tuple(
    Panel(
        title=f'{title}: {label}, worst dot',
        curves=((f'fp8/{operand}/{measure}/{worst}', worst),),
        unit=unit,
        log=log,
        absent='',
    )
    for measure, title, unit, log, worst in MAPS
    for operand, label in OPERANDS
)
# metric, label, colour: fixed, so that phases look alike in all reports.
PHASES = (
    ('timing_s/gen', 'rollout', 0),
    ('timing_s/update_actor', 'update', 1),
    ('timing_s/reward', 'rewards', 2),
    ('timing_s/old_log_prob', 'old log-probs', 3),
    ('timing_s/testing', 'evaluation', 4),
    ('timing_s/ref', 'reference', 5),
    ('timing_s/save_checkpoint', 'checkpoint', 6),
)


def heldout_panels(runs: list[Run]) -> list[Panel]:
  """Returns a panel of held-out accuracy per data source and precision."""
  found: dict[tuple[str, str], list[str]] = {}
  for name in dict.fromkeys(m for run in runs for m in run.series):
    match = re.fullmatch(r'val-([^/]+)/(.+)/acc/mean@(.+)', name)
    if match and '/ci95' not in name:
      found.setdefault((match[1], match[2]), []).append(match[3])
  panels = []
  for (precision, source), counts in found.items():
    # Runs may have taken different numbers of samples.
    kinds = [f'mean@{count}' for count in counts]
    if len(runs) == 1 and counts[0] != '1':
      kinds += [f'{kind}@{counts[0]}' for kind in ('best', 'maj')]
    elsewhere = '' if precision == 'core' else f', in {precision}'
    panels.append(
        Panel(
            title=f'Held-out accuracy: {source}{elsewhere}',
            curves=tuple(
                (f'val-{precision}/{source}/acc/{k}', k) for k in kinds
            ),
            unit='%',
            note='Band: 95% interval over problems.',
            absent='',
        )
    )
  return panels
