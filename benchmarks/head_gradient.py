"""What FP8 does to a head of 152064 tokens: log-probs and gradients, on a CPU.

    python -m benchmarks.head_gradient --output=benchmarks/results/NAME

Random hidden rows and a random head; `sharpness` scales the logits, so that
rows go from nearly uniform to nearly certain. Each row's token is drawn from
its softmax, its advantage is +1 or -1, and the loss is GRPO's first step:
minus the mean of advantage times log-prob. Everything is compared with the
same in float32: the head in bfloat16, and as a dot of `fp8_delayed`, whose
scales come from the amaxes of these very values.
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import common
from jetrl_jax.compilation import exact_jit
from jetrl_jax.fp8 import QTensor, Recipe, dot, formats, slots
from jetrl_jax.fp8.quantization import quantize, scale_from_amax

_ROWS = flags.DEFINE_integer('rows', 64, 'Hidden rows.')
_WIDTH = flags.DEFINE_integer('width', 256, 'Of a hidden row.')
_VOCAB = flags.DEFINE_integer('vocab', 152064, 'Tokens.')
_SHARPNESS = flags.DEFINE_list(
    'sharpness', ['0.1', '2', '3.5', '5', '8'], 'Deviations of the logits.'
)
_COLUMNS = (
    ('sharpness', 'deviation of the logits', '.1f'),
    ('entropy', 'entropy, nats', '.2f'),
    ('head', 'head', ''),
    ('logprob_error', 'log-prob off by, nats', '.4f'),
    ('hidden_cosine', 'cosine of dX', '.4f'),
    ('kernel_cosine', 'cosine of dW', '.4f'),
    ('kernel_norm', 'norm of dW', '.4f'),
    ('flushed', 'logit gradients flushed', '.1%'),
)
_HEADS = {
    'float32': Recipe(name='bf16', compute_dtype='float32'),
    'bfloat16': Recipe(name='bf16'),
    'FP8': Recipe(),
}


def _scale(amax) -> jax.Array:
  amax = jnp.float32(amax)
  return scale_from_amax(amax, formats.E4M3, margin=0, power_of_two=True)


def _slot(hidden_MD, kernel_VD, grad_amax) -> dict:
  amaxes = {
      'input': jnp.max(jnp.abs(hidden_MD)),
      'kernel': jnp.max(jnp.abs(kernel_VD)),
      'output_grad': grad_amax,
  }
  empty = slots.init_slot(2)
  return {k: empty[k] | {'scale': _scale(v)} for k, v in amaxes.items()}


def _losses(recipe, hidden_MD, kernel_VD, targets_M, advantage_M, slot):
  """Returns (log-probs, (dX, dW, what the slot saw))."""
  dtype = recipe.dtype
  hidden_MD = hidden_MD.astype(dtype)
  weight = kernel_VD.astype(dtype)
  if recipe.is_delayed:
    scale = slot['kernel']['scale']
    values = quantize(weight, scale, formats.E4M3)
    weight = QTensor(values=values, scale=scale)

  def loss(hidden_MD, master_VD, slot):
    logits_MV = dot(
        recipe,
        hidden_MD,
        master_VD,
        weight,
        slot if recipe.is_delayed else None,
        jnp.ones(hidden_MD.shape[0]),
        out_dtype=jnp.float32,
    )
    picked_M1 = jnp.take_along_axis(logits_MV, targets_M[:, None], axis=1)
    found_M = picked_M1[:, 0] - jax.nn.logsumexp(logits_MV, axis=1)
    return -jnp.mean(advantage_M * found_M), found_M

  grad = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
  gradients, found_M = grad(hidden_MD, kernel_VD, slot)
  return found_M, gradients


def measure(sharpness: float) -> list[dict]:
  """Returns a row for the head in bfloat16 and one in FP8."""
  rng = np.random.default_rng(0)
  rows, width = _ROWS.value, _WIDTH.value
  hidden_MD = rng.normal(size=(rows, width)).astype(np.float32)
  kernel_VD = rng.normal(size=(_VOCAB.value, width)).astype(np.float32)
  kernel_VD *= sharpness / width**0.5
  logits_MV = hidden_MD @ kernel_VD.T
  # Drawn by the largest of logits and Gumbel noise.
  targets_M = np.argmax(logits_MV + rng.gumbel(size=logits_MV.shape), axis=1)
  advantage_M = rng.choice([-1.0, 1.0], rows).astype(np.float32)
  logp_MV = np.asarray(jax.nn.log_softmax(logits_MV, axis=1))
  entropy = float(-(np.exp(logp_MV) * logp_MV).sum(axis=1).mean())
  own_M = 1 - np.exp(logp_MV[np.arange(rows), targets_M])
  # As the amax history has it; no other entry of a row is larger.
  slot = _slot(hidden_MD, kernel_VD, own_M.max() / rows)

  found = {}
  for name, recipe in _HEADS.items():
    run = exact_jit(lambda *args, r=recipe: _losses(r, *args))
    found[name] = jax.device_get(
        run(hidden_MD, kernel_VD, targets_M, advantage_M, slot)
    )

  def cosine(a, b):
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

  exact_logprob, exact = found['float32']
  measured = []
  for name in ('bfloat16', 'FP8'):
    logprob, gradients = found[name]
    row = {
        'sharpness': sharpness,
        'entropy': entropy,
        'head': name,
        'logprob_error': float(np.abs(logprob - exact_logprob).mean()),
        'hidden_cosine': cosine(gradients[0], exact[0]),
        'kernel_cosine': cosine(gradients[1], exact[1]),
        'kernel_norm': float(
            np.linalg.norm(gradients[1]) / np.linalg.norm(exact[1])
        ),
    }
    if name == 'FP8':
      elements, _, flushed, *_ = gradients[2]['output_grad']['health']
      row['flushed'] = float(flushed / elements)
    measured.append(row)
  return measured


def main(argv: list[str]) -> None:
  """Measures every sharpness."""
  del argv
  rows = [row for s in _SHARPNESS.value for row in measure(float(s))]
  worst = min(row['kernel_cosine'] for row in rows if row['head'] == 'FP8')
  summary = {'smallest cosine of dW in FP8': worst}
  common.write(rows, summary, common.table(rows, _COLUMNS))


if __name__ == '__main__':
  common.run(main)
