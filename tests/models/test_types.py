import dataclasses

import pytest

from jetrl_jax.models import published
from jetrl_jax.models.hf.layout import layout
from jetrl_jax.models.types import FAMILIES, Llama3RopeScaling
from tests.models import tiny


@pytest.mark.parametrize(
    ('config', 'count'),
    [
        # The parameter counts that the model cards' safetensors files add up
        # to, embeddings included, tied ones once.
        (published.QWEN2_5_0_5B, 494_032_768),
        (published.QWEN2_5_7B, 7_615_616_512),
        (published.QWEN2_5_14B, 14_770_033_664),
        (published.QWEN2_5_32B, 32_763_876_352),
        (published.QWEN3_8B, 8_190_735_360),
        (published.LLAMA_3_1_8B, 8_030_261_248),
        (published.LLAMA_3_1_70B, 70_553_706_496),
    ],
)
def test_a_published_shape_has_the_published_number_of_parameters(
    config, count
):
  assert config.num_params == count


@pytest.mark.parametrize('family', FAMILIES)
def test_num_params_counts_the_leaves_of_the_layout(family):
  config = tiny.config(family)
  leaves = [row.shape for row in layout(config)]
  count = sum(
      shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in leaves
  )
  assert config.num_params == count


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'family': 'gpt2'}, "family 'gpt2': allowed are qwen2, qwen3, llama"),
        ({'num_layers': 0}, 'num_layers 0: allowed are integers from 1'),
        ({'num_layers': True}, 'num_layers True'),
        ({'vocab_size': 16.0}, 'vocab_size 16.0'),
        ({'vocab_size': 2**31}, 'vocab_size 2147483648'),
        ({'num_kv_heads': 3}, 'num_heads 4 must be a multiple of'),
        ({'head_dim': 3}, 'head_dim 3 must be even'),
        ({'norm_eps': 0.0}, 'norm_eps 0.0'),
        ({'norm_eps': float('nan')}, 'norm_eps nan'),
        ({'rope_theta': 10**400}, 'rope_theta 1000'),
        ({'rope_theta': '1e6'}, "rope_theta '1e6'"),
        ({'qkv_bias': False}, "qkv_bias False: family 'qwen2' has True"),
        ({'tied_embeddings': 1}, 'tied_embeddings 1'),
        ({'rope_scaling': {'factor': 8}}, 'rope_scaling'),
    ],
)
def test_an_impossible_shape_is_refused_with_its_value(changes, message):
  possible = tiny.config()
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(possible, **changes)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'factor': 0.5}, 'rope factor 0.5'),
        ({'factor': 'eight'}, "factor 'eight'"),
        ({'high_freq_factor': 1.0}, 'high_freq_factor 1.0 must be above'),
        ({'original_max_position_embeddings': 0}, 'embeddings 0'),
    ],
)
def test_an_impossible_rope_scaling_is_refused_with_its_value(changes, message):
  scaling = published.LLAMA_3_1_8B.rope_scaling
  assert isinstance(scaling, Llama3RopeScaling)
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(scaling, **changes)
