r"""Measures how far updates of all sizes move a policy, by what is in 8 bits.

    python -m benchmarks.update_noise --checkpoint=FOLDER \
        --data=data/gsm8k_train.jsonl --answers=written --prompts=12 \
        --step_prompts=4 --tokens=128 --output=OUT

Masters are spread in their rounding cells, as a run of an 8-bit recipe has
them. They move by minus the sign of BF16's gradient times a size: Adam's first
step at that rate. Then the log-probs of one batch of answers are compared with
those before, in BF16, with 8-bit weights alone, and with 8-bit weights and
inputs. Half of the mean squared difference is k3 to second order. The share of
8-bit weights that changed says how much of an update reached the dots, the
share of ratios outside 0.8 to 1.2 what a second mini-batch would clip of it.

What falls with the size is the update. What stays however small it is comes
from rounding inputs: a change in the last bits of one layer makes the next ones
round to other values.
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import common, layer_health
from jetrl_jax.models.policy import PolicyParams

_UPDATES = flags.DEFINE_list(
    'updates', ['2e-5', '2e-6', '2e-7', '2e-8', '2e-9'], 'Their sizes.'
)
# Name -> program of layer_health.
ARMS = {
    'BF16': 'bf16',
    '8-bit weights': layer_health.KERNELS_ONLY,
    '8-bit weights and inputs': 'default',
}


def _moved(before, after) -> float:
  """Returns the share of 8-bit weights with another value."""
  changed = total = 0
  for one, other in zip(before, after, strict=True):
    # As numbers: 0 and -0 are one.
    pair = (x.astype(jnp.bfloat16) for x in (one, other))
    changed += int(jnp.not_equal(*pair).sum())
    total += one.size
  return changed / total


def main(argv: list[str]) -> None:
  """Measures and writes the record."""
  del argv
  config = layer_health.config_of()
  config.model.spread_masters = True
  bench = layer_health.Bench(config, ['bf16', 'default'])
  bench.prepare()
  bench.compile()
  batch = bench.steps[0]
  mask = batch.loss_mask > 0
  reference = bench.programs['bf16']
  gradients, _ = reference.run(reference.state, batch)
  signs = jax.tree.map(
      lambda g: jnp.sign(g).astype(jnp.int8), gradients.trainable
  )
  calibrated = bench.calibrated(bench.programs['default'].state, 16).fp8_state
  # A 0.5B of float32 fits into 16 GB once these are gone.
  del gradients, reference
  for program in bench.programs.values():
    del program.state

  def score(arm: str, params):
    """Returns (log-probs of the answers, 8-bit weights)."""
    program = bench.programs[arm]
    state = bench.create(program.policy, params)
    slots = state.fp8_state if arm == 'bf16' else calibrated
    logprobs_BT, _ = program.step.logprobs(
        PolicyParams(state.weights, slots), batch, jnp.float32(1)
    )
    kept = [x for x in jax.tree.leaves(state.weights) if x.dtype.itemsize == 1]
    return np.float64(np.asarray(logprobs_BT)[mask]), kept

  rows = []
  first = {}
  for size in (0.0, *map(float, _UPDATES.value)):
    params = jax.tree.map(
        lambda p, s, size=size: p - size * s, bench.params, signs
    )
    for name, arm in ARMS.items():
      found = score(arm, params)
      if not size:
        first[name] = found
        continue
      gap = found[0] - first[name][0]
      rows.append(
          {
              'arm': name,
              'size': size,
              'half_mean_square': float((gap**2).mean() / 2),
              'mean_absolute': float(np.abs(gap).mean()),
              'clipped': float((np.abs(np.exp(gap) - 1) > 0.2).mean()),
          }
      )
      if found[1]:
        rows[-1]['weights_changed'] = _moved(first[name][1], found[1])
      layer_health.say(str(rows[-1]))
  table = common.table(
      rows,
      (
          ('arm', 'in 8 bits', ''),
          ('size', 'update', '.0e'),
          ('half_mean_square', 'half mean square', '.2e'),
          ('mean_absolute', 'mean', '.2e'),
          ('clipped', 'ratio outside 0.8 to 1.2', '.1%'),
          ('weights_changed', '8-bit weights that changed', '.4%'),
      ),
  )
  between = first['8-bit weights and inputs'][0] - first['BF16'][0]
  bench.summary['half mean square between 8 bits and BF16'] = float(
      (between**2).mean() / 2
  )
  common.write(rows, bench.summary, table)


if __name__ == '__main__':
  flags.mark_flags_as_required(['checkpoint', 'data'])
  common.run(main)
