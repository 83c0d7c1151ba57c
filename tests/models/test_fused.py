"""The kernels of a fused decode step are put together as the step is."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest

from jetrl_jax.core.collectives import Axes
from jetrl_jax.fp8 import Recipe
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.gate_up import mosaic_sm90 as gate_up
from jetrl_jax.kernels.swiglu import mosaic_sm90 as swiglu
from jetrl_jax.models.policy import Policy, PolicyParams
from tests import kernels_in_use
from tests.hurry import fast_compile_jit
from tests.models import fused, tiny
from tests.rl import tiny_run

FP8 = Recipe()
# What a decode step on a GPU has, but for attention: it is the same in a fused
# step, and takes half a minute when it is interpreted.
_DECODE = 'add_norm_quantize', 'mlp', 'rope_append', 'swiglu'
# In each layer, dots beside each other that are quantised and that are not.
SOME = Recipe(
    high_precision_layers=(
        'layers_0/(attn/o|mlp/down)',
        'layers_1/(attn/qkv|mlp/gate_up)',
    )
)


@kernels_in_use.needs_mosaic
def test_a_decode_step_waits_for_no_weights_of_other_devices(monkeypatch):
  kernels_in_use.as_on_hopper(monkeypatch)
  sizes = dict(model_dim=512, head_dim=64, ffn_dim=512, vocab_size=128)
  one = Policy(
      model=tiny.config('qwen2', **sizes),
      recipe=FP8,
      tile=64,
      kernels=dispatch.automatic(),
  )
  state = tiny_run.state_shapes(one)
  params = PolicyParams(state.weights, state.fp8_state)
  rows, table = (jax.ShapeDtypeStruct(x, 'i4') for x in ((16,), (16, 2)))
  caches = [one.page_shapes(16, 64)] * one.model.num_layers

  def traced(axes):
    of = dataclasses.replace(one, axes=axes)
    function = of.bound(of.decode)
    return str(jax.make_jaxpr(function)(params, rows, rows, table, caches))

  # With `mesh.fsdp` a rollout has whole weights.
  assert traced(Axes(fsdp=2)) == traced(Axes())


@kernels_in_use.needs_mosaic
@pytest.mark.parametrize('ffn_dim', [128, 120])
def test_a_fused_step_has_the_swiglu_of_the_step(monkeypatch, ffn_dim):
  # A kernel for some widths, XLA for others: never one here and one there.
  kernel = mock.Mock(wraps=swiglu.swiglu_of)
  monkeypatch.setattr(swiglu, 'swiglu_of', kernel)
  kernels_in_use.use(monkeypatch, *_DECODE)
  sizes = dict(model_dim=64, head_dim=64, ffn_dim=ffn_dim, vocab_size=80)
  policy = fused.policy(tiny.config('qwen2', **sizes), FP8, 'compute')
  monkeypatch.setattr(fused, 'exact_jit', lambda f: f)
  params = jax.eval_shape(lambda: fused.params(policy))
  rows, caches = jax.ShapeDtypeStruct((16,), 'i4'), policy.page_shapes(16, 64)
  calls = []
  for is_fused in (True, False):
    one = policy if is_fused else fused.separately(policy)
    table = jax.ShapeDtypeStruct((16, 2), 'i4')
    jax.eval_shape(
        one.bound(one.decode), params, rows, rows, table, [caches] * 2
    )
    calls.append(kernel.called)
    kernel.reset_mock()
  assert calls == [ffn_dim == 128] * 2


@kernels_in_use.needs_mosaic
@pytest.mark.parametrize(
    'recipe, kv, family, dim, rows_of_one',
    [
        pytest.param(
            *(FP8, 'float8_e4m3fn', 'qwen2', 64, ()), marks=pytest.mark.slow
        ),
        # Where the MLP's two dots are one, and gate_up is with SwiGLU.
        pytest.param(
            *(FP8, 'compute', 'qwen2', 128, ()), marks=pytest.mark.slow
        ),
        (FP8, 'compute', 'qwen3', 128, (64,)),
        (SOME, 'float8_e4m3fn', 'llama', 128, ()),
        pytest.param(
            *(Recipe(name='bf16'), 'compute', 'qwen2', 64, ()),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(Recipe(power_of_two_scales=False), 'compute', 'qwen2', 64, ()),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(Recipe(name='fp8_token'), 'compute', 'qwen2', 64, ()),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_fused_step_is_the_step(
    monkeypatch, recipe, kv, family, dim, rows_of_one
):
  monkeypatch.setattr(gate_up, 'ROWS', rows_of_one)
  kernels_in_use.interpret(monkeypatch)
  one_kernel = mock.Mock(wraps=gate_up.hidden)
  monkeypatch.setattr(gate_up, 'hidden', one_kernel)
  kernels_in_use.use(monkeypatch, *_DECODE, 'gate_up')
  sizes = dict(model_dim=dim, head_dim=64, ffn_dim=2 * dim, vocab_size=80)
  # Of 64 rows a layer takes long.
  sizes |= dict(num_layers=1 if rows_of_one else 2)
  policy = fused.policy(tiny.config(family, **sizes), recipe, kv)
  params = fused.params(policy)
  rows = rows_of_one[0] if rows_of_one else 16
  joined, apart = (
      fused.steps(policy, params, fused=f, rows=rows, jit=fast_compile_jit)
      for f in (True, False)
  )
  assert one_kernel.called == bool(rows_of_one)
  for a, b in zip(jax.tree.leaves(joined), jax.tree.leaves(apart), strict=True):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    if recipe in (FP8, SOME):
      # A CPU rounds a product before it adds it to the residual stream, of
      # which a wider decoder has more.
      share = 0.04 if dim == 64 else 0.06
      assert np.mean(np.abs(a - b)) <= share * np.mean(np.abs(b))
    else:
      np.testing.assert_array_equal(a, b)
