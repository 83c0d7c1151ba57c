"""Draws docs/how_it_works.md: python -m benchmarks.plot_one_flow.

`eight_bits.png`, by formula: what E4M3 loses of activations at each scale, and
delayed scaling after a jump. `one_flow_tokens.png`: the log-probs of sampled
tokens by two training forwards, less those of an FP8 rollout. With --measure
they are measured first, on the quickstart's checkpoint, and written to
benchmarks/results/; a minute on a CPU.
"""

import argparse
import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jetrl_jax import data, fp8, models, rl
from jetrl_jax.core import rng, sharding
from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.core.typing import NpArray
from jetrl_jax.metrics import provenance
from tools import figure_style

_ROOT = pathlib.Path(__file__).parents[1]
_EXAMPLE = _ROOT / 'examples' / 'quickstart'
_TOKENS = (
    _ROOT / 'benchmarks/results/one_flow_tokens_quickstart_cpu_2026-11-25.json'
)
_PROMPTS, _SAMPLES = 32, 4
# The largest finite value of E4M3.
_TOP = 448.0


def measure() -> dict[str, list[float]]:
  """Returns the log-probs of one FP8 rollout's tokens, in nats, three times.

  By the rollout, by the training forward of the same recipe and the same
  arrays, and by a BF16 training forward from the same masters.
  """
  config = models.load_config(_EXAMPLE / 'checkpoint')
  tokenizer = data.Tokenizer(_EXAMPLE / 'checkpoint')
  rows = data.load_examples(
      (str(_EXAMPLE / 'heldout.jsonl'),),
      prompt_key='question',
      answer_key='answer',
  )
  prompts = data.PromptDataset(
      rows,
      tokenizer,
      prompt_format=data.PlainFormat(template='{prompt}'),
      max_prompt_length=16,
  )
  prompts = list(prompts)[:_PROMPTS]
  mesh, optimizer = sharding.make_mesh(), rl.OptimizerConfig().build()
  masters = models.load_checkpoint(
      _EXAMPLE / 'checkpoint', config, dtype='float32'
  )
  policy = rl.Policy(model=config, recipe=fp8.Recipe(), tile=16, remat='none')
  policy_16 = dataclasses.replace(policy, recipe=fp8.Recipe(name='bf16'))
  state, state_16 = (
      rl.create_state(p, masters, optimizer, mesh) for p in (policy, policy_16)
  )
  settings = rl.EngineConfig(
      num_slots=_PROMPTS * _SAMPLES,
      max_prompt_length=16,
      max_response_length=32,
      stop_ids=tuple(tokenizer.eos_ids),
  )
  engine = rl.Engine(policy, settings, mesh)

  def params(state):
    return rl.PolicyParams(state.weights, state.fp8_state)

  def sampled(state, step):
    return rl.rollout.rollout(
        engine,
        params(state),
        prompts,
        num_generations=_SAMPLES,
        temperature=1.0,
        base_key=rng.key(0, rng.ROLLOUT, step),
        weight_version=0,
    )

  def packed(completions):
    sequences = [
        rl.sequence_from_completion(
            c, advantage=0.0, loss_weight=1e-3, mask_truncated=False, origin=i
        )
        for i, c in enumerate(completions)
    ]
    return rl.pack(
        sequences, row_length=48, rows_per_micro_batch=len(sequences), tile=16
    )

  def scored(policy, state):
    rows = packed(completions)
    forward = exact_jit(policy.logprobs)
    values = [
        forward(params(state), batch, jnp.float32(1.0))[0]
        for batch in rows.batches
    ]
    values = rl.unpack(values, rows)
    return np.concatenate(
        [
            v[len(c.prompt_tokens) :]
            for v, c in zip(values, completions, strict=True)
        ]
    )

  # As at the start of a run: scales from a discarded backward pass.
  calibration = rl.Calibration(policy, mesh, state)
  state = calibration.fill(state, packed(sampled(state, 0)).batches, 1.0)
  completions = sampled(state, 1)
  found = {
      'rollout': np.concatenate([c.logprobs for c in completions]),
      'fp8_training': scored(policy, state),
      'bf16_training': scored(policy_16, state_16),
  }
  # Nine digits are float32 to the bit.
  return {n: [float(f'{x:.9g}') for x in values] for n, values in found.items()}


def _window(activations: NpArray, scale: float) -> tuple[float, float, float]:
  """Returns (signal to noise in dB, share saturated, share flushed)."""
  q = fp8.quantize(jnp.asarray(activations), jnp.float32(scale), fp8.E4M3)
  values = np.asarray(q, np.float64)
  noise = values * scale - activations
  power = np.square(activations, dtype=np.float64).sum()
  saturated = np.mean(np.abs(activations) > _TOP * scale)
  flushed = np.mean((values == 0) & (activations != 0))
  return 10 * np.log10(power / np.square(noise).sum()), saturated, flushed


def _draw_window(axes: plt.Axes) -> None:
  """Signal to noise against the scale: a plateau."""
  random = np.random.default_rng(0)
  activations = random.standard_t(df=5, size=20_000).astype(np.float32)
  amax = np.abs(activations).max()
  chosen = float(
      fp8.scale_from_amax(
          jnp.float32(amax), fp8.E4M3, margin=0, power_of_two=True
      )
  )
  scales = 2.0 ** np.arange(-16, 10)
  decibels, saturated, flushed = np.transpose(
      [_window(activations, scale) for scale in scales]
  )
  axes.plot(scales, decibels, 'o-', label='signal to noise')
  for share, style, label in (
      (saturated, '--', 'saturated: % of values'),
      (flushed, '-.', 'flushed to 0: % of values'),
  ):
    axes.plot(scales, 100 * share, style, label=label)
  axes.axvline(chosen, color=figure_style.GREEN, lw=1)
  axes.text(
      1.3 * chosen,
      45,
      f'2^ceil(log2(amax / 448))\n= {chosen:g}',
      color=figure_style.GREEN,
  )
  axes.set_xscale('log', base=2)
  axes.set_ylim(0, 105)
  axes.set_xlabel('scale')
  axes.set_ylabel('dB, or % of values')
  axes.legend(loc='upper right')
  axes.set_title(f'Activations with amax {amax:.0f} in E4M3, at each scale')


def _draw_history(axes: plt.Axes) -> None:
  """What the format holds at each step, while a tensor's amax jumps."""
  amaxes = 300 * np.array(
      [1, 1.1, 0.9, 1, 1.2, 6, 5, 1, 1.1, 0.9, 1, 1, 1.1, 1, 0.9, 1]
  )
  axes.plot(amaxes, 'o', color=figure_style.BLACK, label='amax of the tensor')
  for margin, color, style in (
      (0, figure_style.VERMILLION, '-'),
      (3, figure_style.BLUE, '--'),
  ):
    held = largest_held(
        amaxes, fp8.Recipe(amax_history_length=4, margin=margin)
    )
    axes.step(
        range(len(held)),
        held,
        style,
        where='mid',
        color=color,
        label=f'largest value held, margin {margin}',
    )
    over = np.flatnonzero(amaxes > held)
    if len(over):
      axes.plot(
          over,
          amaxes[over],
          'x',
          ms=12,
          mew=2,
          color=color,
          label=f'saturates, margin {margin}',
      )
  axes.set_yscale('log', base=2)
  axes.set_ylim(2**7, 2**20)
  axes.set_xlabel('step')
  axes.set_ylabel('magnitude')
  axes.legend(loc='upper right')
  axes.set_title('Delayed scaling with a history of 4 steps')


def largest_held(amaxes: NpArray, recipe: fp8.Recipe) -> NpArray:
  """Returns the largest value that a dot's input holds at each step."""
  state = fp8.init_state(
      {'dot': {'kernel': jnp.ones((16, 16), jnp.float32)}}, recipe
  )
  held = []
  # The first step's amax twice: a run starts calibrated.
  for amax in (amaxes[0], *amaxes):
    held.append(_TOP * float(state['dot']['input']['scale']))
    seen = jax.tree.map(jnp.zeros_like, state)
    history = seen['dot']['input']['amax_history'].at[0].set(amax)
    seen['dot']['input']['amax_history'] = history
    state = fp8.roll(
        fp8.observe(state, fp8.stack_observations(seen)),
        recipe,
        operands=('input',),
    )
  return np.array(held[1:])


def _draw_tokens(axes: list[plt.Axes], tokens: dict[str, list[float]]) -> None:
  """A dot for each token: training's log-prob less the rollout's."""
  rollout = np.array(tokens['rollout'])
  for panel, name, title, color in (
      (axes[0], 'bf16_training', 'BF16', figure_style.VERMILLION),
      (axes[1], 'fp8_training', 'FP8, the same arrays', figure_style.BLUE),
  ):
    difference = np.array(tokens[name]) - rollout
    count = np.count_nonzero(difference)
    panel.axhspan(np.log(0.8), np.log(1.2), **figure_style.SHADE)
    panel.plot(difference, '.', ms=2, color=color)
    panel.set_yscale('symlog', linthresh=1e-4)
    panel.set_yticks([-1, -1e-2, 0, 1e-2, 1])
    panel.set_title(
        f'FP8 rollout, training in {title}: {count} of {len(difference)}'
        ' tokens differ',
        loc='left',
    )
    panel.set_ylabel('nats')
  axes[1].set_xlabel('sampled token (grey: a clip range of 0.2 around ratio 1)')


def draw(folder: pathlib.Path) -> None:
  """Writes both figures."""
  figure_style.use()
  figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
  _draw_window(left)
  _draw_history(right)
  figure_style.save(figure, folder / 'eight_bits.png')
  figure, axes = plt.subplots(2, 1, figsize=(9, 4.4), sharex=True, sharey=True)
  _draw_tokens(list(axes), json.loads(_TOKENS.read_text())['log_probs'])
  figure_style.save(figure, folder / 'one_flow_tokens.png')


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--measure', action='store_true')
  if parser.parse_args().measure:
    about = {
        'commit': provenance.commit(),
        'versions': provenance.versions(),
        'hardware': str(jax.devices()[0].device_kind),
        'command': 'python -m benchmarks.plot_one_flow --measure',
    }
    _TOKENS.write_text(json.dumps(about | {'log_probs': measure()}) + '\n')
  draw(_ROOT / 'docs')


if __name__ == '__main__':
  main()
