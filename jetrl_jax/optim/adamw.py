"""The optimiser: AdamW with warmup and decay, moments in FP8 or float32."""

import dataclasses

import jax
import optax

from jetrl_jax.kernels.adamw import reference as adamw_reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
  """AdamW and its schedule.

  Attributes:
    lr: peak learning rate.
    betas: decay of the two moments.
    eps: added to the root of the second moment.
    weight_decay: decoupled, on matrices only.
    grad_clip: largest global L2 norm of the gradient.
    lr_warmup_steps: optimiser steps of linear warmup from 0.
    lr_decay: 'constant', 'cosine' or 'linear', over all optimiser steps of the
      run.
    lr_decay_steps: optimiser steps until the decay's end, warmup included;
      unread for 'constant'.
    moments: Adam's moments: 'fp8' (COAT's expanded E4M3 groups) or 'float32'.
    master_rounding: how bfloat16 masters (model.master_dtype) are rounded:
      'nearest', which loses small updates, or 'stochastic', which keeps their
      mean. Float32 masters are not rounded.
    seed: the seed of the random bits of 'stochastic'.
  """

  lr: float = 1e-6
  betas: tuple[float, float] = (0.9, 0.999)
  eps: float = 1e-8
  weight_decay: float = 0.01
  grad_clip: float = 1.0
  lr_warmup_steps: int = 0
  lr_decay: str = 'constant'
  lr_decay_steps: int = 0
  moments: str = 'fp8'
  master_rounding: str = 'nearest'
  seed: int = 0

  def __post_init__(self):
    for name in ('lr', 'eps', 'grad_clip'):
      if not getattr(self, name) > 0:
        raise ValueError(f'{name} is {getattr(self, name)}; it must be > 0')
    if not all(0 <= b < 1 for b in self.betas) or len(self.betas) != 2:
      raise ValueError(f'betas are {self.betas}; allowed: two in [0, 1)')
    if self.weight_decay < 0 or self.lr_warmup_steps < 0:
      raise ValueError(
          f'weight_decay is {self.weight_decay}, lr_warmup_steps is'
          f' {self.lr_warmup_steps}; both must be >= 0'
      )
    if self.moments not in ('fp8', 'float32'):
      raise ValueError(f'moments is {self.moments!r}; allowed: fp8, float32')
    if self.master_rounding not in ('nearest', 'stochastic'):
      raise ValueError(
          f'master_rounding is {self.master_rounding!r}; allowed: nearest,'
          ' stochastic'
      )
    if self.lr_decay not in ('constant', 'cosine', 'linear'):
      raise ValueError(
          f'lr_decay is {self.lr_decay!r}; allowed: constant, cosine, linear'
      )
    if self.lr_decay != 'constant' and (
        self.lr_decay_steps <= self.lr_warmup_steps
    ):
      raise ValueError(
          f'the run has {self.lr_decay_steps} optimiser steps, and'
          f' optim.lr_decay is {self.lr_decay!r}, which needs more than'
          f' optim.lr_warmup_steps ({self.lr_warmup_steps}): lower it, or set'
          " optim.lr_decay='constant'"
      )

  def learning_rate(self, count):
    """Returns the learning rate of optimiser step `count`, from 0."""
    return self._schedule()(count)

  def _schedule(self) -> optax.Schedule:
    remaining = self.lr_decay_steps - self.lr_warmup_steps
    match self.lr_decay:
      case 'cosine':
        decay = optax.cosine_decay_schedule(self.lr, remaining)
      case 'linear':
        decay = optax.linear_schedule(self.lr, 0.0, remaining)
      case _:
        decay = optax.constant_schedule(self.lr)
    if not self.lr_warmup_steps:
      return decay

    # Step n of the warmup runs at (n + 1) / warmup, so step 0 is not wasted.
    def warmup(count):
      return self.lr * (count + 1) / self.lr_warmup_steps

    return optax.join_schedules([warmup, decay], [self.lr_warmup_steps])

  def build(self) -> adamw_reference.AdamW:
    """Returns the optax transformation."""
    codec = (
        adamw_reference.fp8_codec()
        if self.moments == 'fp8'
        else adamw_reference.float32_codec()
    )
    return adamw_reference.adamw(
        self.learning_rate,
        *self.betas,
        self.eps,
        self.weight_decay,
        # Norm scales and biases do not decay.
        lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        codec=codec,
    )
