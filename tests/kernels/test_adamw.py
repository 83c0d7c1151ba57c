"""The kernel that moves a leaf, against the programs that XLA makes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jetrl_jax.core import collectives, rng, sharding
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.adamw import groups
from jetrl_jax.kernels.adamw import reference as adamw_reference
from jetrl_jax.kernels.requantize import groups as requantize_groups
from jetrl_jax.metrics.writer import Mean
from jetrl_jax.optim import apply, fused_adamw, partition, rounding
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.optim.apply import Gradients
from jetrl_jax.rl.run import train_state
from tests import kernels_in_use
from tests.hurry import fast_compile_jit
from tests.kernels.test_requantize import requantized
from tests.rl import tiny_run

if dispatch.has_mosaic():
  from jetrl_jax.kernels.adamw import mosaic_sm90
  from jetrl_jax.kernels.requantize import mosaic_sm90 as requantize_in_mosaic

_AXES = collectives.Axes()
_SPLIT = {'kernel': False, 'bias': False}


class _Both:
  """One part of a model, moved by the kernel and by XLA."""

  def __init__(self, dtype, at_random: bool, kernel: str = 'mosaic_sm90'):
    self.kernels = dispatch.select('reference').replace(adamw=kernel)
    self.optimizer = OptimizerConfig(
        lr=1e-2, weight_decay=0.5, lr_warmup_steps=4
    ).build()
    self.at_random = at_random
    masters = {
        'kernel': self._normal(0, (16, 256), dtype),
        'bias': self._normal(1, (512,), dtype),
    }
    # In the last of two programs.
    masters['kernel'] = masters['kernel'].at[-1, -1].set(9)
    state = self.optimizer.init(masters)
    keys = set(masters)
    self.join = partition.OptStatePartition(state, keys)
    self.start = masters, *partition.split(state, keys)

  def _normal(self, seed: int, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)

  def gradients(self, step: int):
    """Over twelve powers of two, and some zeros."""
    random, dtype = np.random.default_rng(step + 7), self.start[0]['bias'].dtype
    kernel = random.normal(size=(16, 256))
    kernel *= np.exp2(random.normal(size=kernel.shape) * 4)
    kernel[:, ::5] = kernel[3] = 0.0
    return {
        'kernel': jnp.asarray(kernel, dtype),
        'bias': self._normal(step, (512,), dtype),
    }

  def step_control(self, step: int, ok: bool = True):
    rounding_keys = {}
    if self.at_random:
      root = rng.key(3, rng.ROUNDING)
      rounding_keys = rounding.rounding_keys(
          root, jnp.int32(step), {'part': self.start[0]}
      )['part']
    return jnp.asarray(ok), jnp.float32(0.5 if ok else 0.0), rounding_keys

  @functools.cached_property
  def kernel(self):
    def run(*arguments):
      with kernels_in_use.run(self.kernels):
        return fused_adamw.update_group(
            self.optimizer, self.join, _AXES, _SPLIT, *arguments
        )

    return jax.jit(run)

  @functools.cached_property
  def reference(self):
    def run(part, gradients, step_control):
      masters, moments, shared = part
      of = apply.ParamGroup(
          trainable=masters,
          frozen={},
          fp8_state={},
          moments=moments,
          weights={},
      )
      return apply._optax_update(
          self.optimizer,
          self.join,
          _AXES,
          _SPLIT,
          of,
          shared,
          gradients,
          step_control,
      )

    return jax.jit(run)


@functools.cache
def _both(dtype: str, at_random: bool) -> _Both:
  return _Both(jnp.dtype(dtype), at_random)


@jax.jit
def _decoded(moments):
  def is_moment(node):
    return isinstance(node, adamw_reference.EncodedMoment)

  decode = adamw_reference.fp8_codec().decode
  return jax.tree.map(decode, moments, is_leaf=is_moment)


def _differing(a, b) -> float:
  return float(np.mean(np.asarray(a) != np.asarray(b)))


@kernels_in_use.needs_mosaic
@pytest.mark.parametrize(
    'dtype, at_random',
    [
        pytest.param('float32', False, marks=pytest.mark.slow),
        pytest.param('bfloat16', False, marks=pytest.mark.slow),
        ('bfloat16', True),
    ],
)
def test_a_step_of_the_kernel_is_a_step_of_xla(dtype, at_random):
  both = _both(dtype, at_random)
  part = both.start
  for step in range(3):
    arguments = both.gradients(step), both.step_control(step)
    ours, theirs = both.kernel(part, *arguments), both.reference(
        part, *arguments
    )
    # The kernel multiplies by the inverse of the bias corrections, and either
    # compiler may contract: a float32 is off by a few of its last bits, and
    # now and then that carries over a rounding to 8 or 16 bits.
    for a, b in zip(*map(jax.tree.leaves, (ours[0], theirs[0])), strict=True):
      assert a.dtype == b.dtype
      if dtype == 'float32':
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
      else:
        a32, b32 = (np.asarray(x).astype(np.float32) for x in (a, b))
        assert _differing(a, b) < 0.002
        np.testing.assert_allclose(a32, b32, rtol=2**-7)
    for a, b in zip(*map(jax.tree.leaves, (ours[1], theirs[1])), strict=True):
      if a.dtype == jnp.float32:
        # A group's exponent follows its least value, which may be what is left
        # of two that nearly cancel: of one group (jax 0.12) by 2.3e-4.
        assert np.sum(np.abs(a - b) > 1e-4 * np.abs(b)) <= 1
        np.testing.assert_allclose(a, b, rtol=1e-2)
      else:
        assert _differing(a, b) < 0.002
    decoded = [
        map(np.asarray, jax.tree.leaves(_decoded(m)))
        for m in (ours[1], theirs[1])
    ]
    for a, b in zip(*decoded, strict=True):
      # One step of E4M3's 3 bits, of the power 1/k that a group needs.
      assert np.mean(np.abs(a - b) > 1e-4 * np.abs(b)) < 0.002
      np.testing.assert_array_equal(np.sign(a), np.sign(b))
    for amax, moved in zip(
        *map(jax.tree.leaves, (ours[3], ours[0])), strict=True
    ):
      assert amax == jnp.max(jnp.abs(moved.astype(jnp.float32)))
    assert [int(n) for n in ours[2]] == [int(n) for n in theirs[2]]
    part = theirs
  # It did move, and not only by the weights' decay.
  assert _differing(part[0]['kernel'], both.start[0]['kernel']) > 0.2


@kernels_in_use.needs_mosaic
def test_a_skipped_step_changes_nothing_whatever_the_gradients():
  both = _both('bfloat16', True)
  moved = both.kernel(both.start, both.gradients(0), both.step_control(0))[:3]
  broken = jax.tree.map(
      lambda g: g.at[0].set(jnp.nan).at[-1].set(jnp.inf), both.gradients(1)
  )
  kept = both.kernel(moved, broken, both.step_control(1, ok=False))
  for a, b in zip(*map(jax.tree.leaves, (kept[:2], moved[:2])), strict=True):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_rows_on_another_device_are_moved_as_in_the_whole():
  # The interpreter of kernels takes two devices' programs for one's.
  both = _Both(jnp.dtype('bfloat16'), True, 'reference')
  mesh = sharding.make_mesh(fsdp=2)
  # Groups, rounding and all: a device has rows of its own of the matrix.
  split = {'kernel': True, 'bias': False}
  arguments = both.start, both.gradients(0), both.step_control(0)
  specs = tuple(sharding.tree_specs(a, mesh) for a in arguments[:2])

  def run(part, gradients, step_control):
    axes = collectives.axes_of(mesh)
    with kernels_in_use.run(both.kernels):
      return fused_adamw.update_group(
          *(both.optimizer, both.join, axes, split),
          *(part, gradients, step_control),
      )[:3]

  halves = jax.jit(
      sharding.per_device(run, mesh, (*specs, P()), specs[0]),
  )(*arguments)
  tiny_run.assert_same_on_all_devices(halves)
  whole = both.kernel(*arguments)[:3]
  for a, b in zip(*map(jax.tree.leaves, (halves, whole)), strict=True):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@kernels_in_use.needs_mosaic
def test_the_kernel_keeps_all_of_a_step_that_is_skipped():
  codec, x = adamw_reference.fp8_codec(), jnp.ones((4, 128))
  operands = x, jnp.nan * x, codec.encode(x), codec.encode(2 * x)
  how = dict(b1=0.9, b2=0.99, eps=1e-8, decay=0.1, interpret=True)
  move = fast_compile_jit(functools.partial(mosaic_sm90.update, **how))
  kept = move(*operands, jnp.zeros((8,)), None)[:3]
  pairs = kept, (operands[0], *operands[2:])
  for a, b in zip(*map(jax.tree.leaves, pairs), strict=True):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_programs_of_equal_size_take_every_group():
  for count in range(1, 200):
    assert count % groups.of_program((count, 128)) == 0


def test_what_is_not_whole_groups_or_not_our_adam_does_not_fit():
  def fits(shape, optimizer=None, codec='fp8', dtype=jnp.bfloat16):
    masters = {'w': jax.ShapeDtypeStruct(shape, dtype)}
    optimizer = optimizer or OptimizerConfig(moments=codec).build()
    state = jax.eval_shape(optimizer.init, masters)
    moments, _ = partition.split(state, {'w'})
    return groups.fits(optimizer, masters, masters, moments)

  assert fits((4, 128)) and fits((3584,)) and fits((3584, 18944))
  assert fits((4, 128), dtype=jnp.float32)
  assert not fits((4, 64)) and not fits((6, 128)) and not fits((4, 192))
  assert not fits(())
  assert not fits((4, 128), codec='float32')
  assert not fits((4, 128), dtype=jnp.float16)
  assert not fits((4, 128), optax.adamw(1e-3))
  codec = adamw_reference.fp8_codec()
  assert not fits((4, 128), adamw_reference.scale_by_adam(codec=codec))
  assert not fits(
      (4, 128), adamw_reference.adamw(1e-3, codec=adamw_reference.fp8_codec(64))
  )
  # All of a part may be frozen.
  assert not groups.fits(
      adamw_reference.adamw(1e-3, codec=codec), {}, {}, [{}, {}]
  )
  # A size whose flat index leaves 32 bits.
  assert not fits((2**20, 2048))


def _applied(mesh, steps: int):
  """States after each of some optimiser steps of two equal FP8 parts."""
  policy = tiny_run.policy(tiny_run.FP8, mesh)
  config = OptimizerConfig(lr=1e-2, master_rounding='stochastic', grad_clip=1e9)

  def placed(seed: int):
    random = np.random.default_rng(seed)

    def make(*shape):
      return jnp.asarray(random.normal(size=shape), jnp.bfloat16)

    leaves = {
        f'layers_{i}': {
            'mlp': {'up': {'kernel': make(32, 512), 'bias': make(512)}},
            'norm': make(512),
        }
        for i in range(2)
    }
    return jax.device_put(leaves, sharding.tree_shardings(leaves, mesh))

  optimizer = config.build()
  moving = train_state.create(policy, placed(0), optimizer, mesh)
  assert moving.fp8_state
  states, apply_step = [], None
  for step in range(steps):
    loss = Mean(sum=jnp.zeros(()), weight=jnp.zeros(()))
    gradients = placed(step + 1)
    if step == 1:
      gradients['layers_1']['norm'] = gradients['layers_1']['norm'] * jnp.inf
    made = Gradients(
        trainable=gradients,
        fp8=scaling_state.stack_observations(
            jax.tree.map(lambda a: a + 1, moving.fp8_state)
        ),
        metrics={'actor/pg_loss': loss},
    )
    apply_step = apply_step or apply.Apply(
        policy, optimizer, config, mesh, moving
    )
    moving, info = apply_step(tiny_run.copy(moving), made)
    assert bool(info.applied) == (step != 1)
    states.append(jax.device_get((moving, info.changed_bytes)))
  return states


@kernels_in_use.needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize('fsdp', [1, 2])
def test_a_step_of_all_kernels_is_a_step_of_xla(monkeypatch, fsdp):
  mesh = sharding.make_mesh(fsdp=fsdp)
  theirs = _applied(mesh, 3)
  # The first interpreted kernel of a process has jax 0.12 trace anew.
  warm = _both('bfloat16', True)
  warm.kernel(warm.start, warm.gradients(0), warm.step_control(0))
  calls = []

  def counted(function):
    def run(*arguments):
      calls.append(function)
      return function(*arguments)

    return run

  kernels_in_use.use(monkeypatch, 'adamw', 'requantize')
  if fsdp == 1:
    kernels_in_use.interpret(monkeypatch)
  else:  # The interpreter takes two devices' programs for one's.
    monkeypatch.setattr(mosaic_sm90, 'update', adamw_reference.update)
    monkeypatch.setattr(requantize_in_mosaic, 'requantize_kernel', requantized)
  monkeypatch.setattr(
      fused_adamw, 'update_group', counted(fused_adamw.update_group)
  )
  monkeypatch.setattr(
      requantize_groups, 'requantize', counted(requantize_groups.requantize)
  )
  ours = _applied(mesh, 3)
  # One program for both parts.
  assert len(calls) == 2
  for (a, changed), (b, wanted) in zip(ours, theirs, strict=True):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
      x, y = (np.asarray(z).astype(np.float32) for z in (x, y))
      # As in the test above, but three steps of it. Of 128 groups' scales two
      # differ so with jax 0.12, and one with 0.10.
      unlike = np.sum(np.abs(x - y) > 1e-3 * np.abs(y))
      assert unlike <= max(1, 0.02 * x.size)
    for x, y in zip(*map(jax.tree.leaves, (changed, wanted)), strict=True):
      np.testing.assert_allclose(x, y, atol=2e-3)
  # The step that was skipped left everything as it was.
  first, second = (jax.tree.map(lambda x: x.tobytes(), s) for s, _ in ours[:2])
  assert first == second
