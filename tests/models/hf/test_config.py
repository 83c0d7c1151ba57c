import dataclasses
import json
import pathlib
import random

import pytest

from jetrl_jax.models import published
from jetrl_jax.models.hf.config import config_from_hf, config_to_hf, load_config
from jetrl_jax.models.types import FAMILIES

GOLDENS = pathlib.Path(__file__).parent / 'goldens'

# The config.json files as published, less token ids and the like.
QWEN2_5_7B = {
    'architectures': ['Qwen2ForCausalLM'],
    'attention_dropout': 0.0,
    'hidden_act': 'silu',
    'hidden_size': 3584,
    'initializer_range': 0.02,
    'intermediate_size': 18944,
    'max_position_embeddings': 131072,
    'max_window_layers': 28,
    'model_type': 'qwen2',
    'num_attention_heads': 28,
    'num_hidden_layers': 28,
    'num_key_value_heads': 4,
    'rms_norm_eps': 1e-06,
    'rope_theta': 1000000.0,
    'sliding_window': 131072,
    'tie_word_embeddings': False,
    'torch_dtype': 'bfloat16',
    'use_cache': True,
    'use_mrope': False,
    'use_sliding_window': False,
    'vocab_size': 152064,
}
QWEN2_5_0_5B = QWEN2_5_7B | {
    'hidden_size': 896,
    'intermediate_size': 4864,
    'max_position_embeddings': 32768,
    'max_window_layers': 24,
    'num_attention_heads': 14,
    'num_hidden_layers': 24,
    'num_key_value_heads': 2,
    'sliding_window': 32768,
    'tie_word_embeddings': True,
    'vocab_size': 151936,
}
QWEN3_8B = {
    'architectures': ['Qwen3ForCausalLM'],
    'attention_bias': False,
    'attention_dropout': 0.0,
    'head_dim': 128,
    'hidden_act': 'silu',
    'hidden_size': 4096,
    'intermediate_size': 12288,
    'max_position_embeddings': 40960,
    'max_window_layers': 36,
    'model_type': 'qwen3',
    'num_attention_heads': 32,
    'num_hidden_layers': 36,
    'num_key_value_heads': 8,
    'rms_norm_eps': 1e-06,
    'rope_scaling': None,
    'rope_theta': 1000000,
    'sliding_window': None,
    'tie_word_embeddings': False,
    'use_sliding_window': False,
    'vocab_size': 151936,
}
LLAMA_3_1_8B = {
    'architectures': ['LlamaForCausalLM'],
    'attention_bias': False,
    'attention_dropout': 0.0,
    'hidden_act': 'silu',
    'hidden_size': 4096,
    'intermediate_size': 14336,
    'max_position_embeddings': 131072,
    'mlp_bias': False,
    'model_type': 'llama',
    'num_attention_heads': 32,
    'num_hidden_layers': 32,
    'num_key_value_heads': 8,
    'pretraining_tp': 1,
    'rms_norm_eps': 1e-05,
    'rope_scaling': {
        'factor': 8.0,
        'low_freq_factor': 1.0,
        'high_freq_factor': 4.0,
        'original_max_position_embeddings': 8192,
        'rope_type': 'llama3',
    },
    'rope_theta': 500000.0,
    'tie_word_embeddings': False,
    'vocab_size': 128256,
}
# Mistral-7B-v0.3; v0.1 has a window of 4096 tokens.
MISTRAL_7B = {
    'architectures': ['MistralForCausalLM'],
    'attention_dropout': 0.0,
    'hidden_act': 'silu',
    'hidden_size': 4096,
    'intermediate_size': 14336,
    'max_position_embeddings': 32768,
    'model_type': 'mistral',
    'num_attention_heads': 32,
    'num_hidden_layers': 32,
    'num_key_value_heads': 8,
    'rms_norm_eps': 1e-05,
    'rope_theta': 1000000.0,
    'sliding_window': None,
    'tie_word_embeddings': False,
    'vocab_size': 32768,
}
PUBLISHED = [
    (QWEN2_5_0_5B, published.QWEN2_5_0_5B),
    (QWEN2_5_7B, published.QWEN2_5_7B),
    (QWEN3_8B, published.QWEN3_8B),
    (LLAMA_3_1_8B, published.LLAMA_3_1_8B),
    (
        MISTRAL_7B,
        dataclasses.replace(
            published.LLAMA_3_1_8B,
            family='mistral',
            vocab_size=32768,
            max_position=32768,
            rope_theta=1e6,
            rope_scaling=None,
        ),
    ),
]


@pytest.mark.parametrize(('hf', 'config'), PUBLISHED)
def test_a_published_config_is_the_preset_of_its_name(hf, config):
  assert config_from_hf(hf) == config


@pytest.mark.parametrize(('_', 'config'), PUBLISHED)
def test_a_config_written_out_and_read_back_is_the_same(_, config):
  written = json.loads(json.dumps(config_to_hf(config)))
  assert config_from_hf(written) == config


@pytest.mark.parametrize(('hf', 'config'), PUBLISHED)
def test_the_layout_of_transformers_5_says_the_same(hf, config):
  newer = dict(hf)
  rope = newer.pop('rope_scaling', None) or {'rope_type': 'default'}
  newer['rope_parameters'] = rope | {'rope_theta': newer.pop('rope_theta')}
  assert config_from_hf(newer) == config


def test_the_goldens_are_in_the_layout_of_transformers_5():
  for family in FAMILIES:
    config = load_config(GOLDENS / family)
    assert config.family == family
    assert config.model_dim == 64
  assert load_config(GOLDENS / 'qwen3').head_dim == 24
  assert load_config(GOLDENS / 'llama').rope_scaling is not None


def test_absent_keys_mean_what_transformers_takes_for_them():
  llama = dict(LLAMA_3_1_8B)
  for key in ('num_key_value_heads', 'tie_word_embeddings', 'rope_theta'):
    del llama[key]
  config = config_from_hf(llama)
  assert config.num_kv_heads == 32
  assert config.rope_theta == 10_000.0
  assert not config.tied_embeddings
  qwen3 = dict(QWEN3_8B, hidden_size=2560)
  del qwen3['head_dim']
  assert config_from_hf(qwen3).head_dim == 128
  mistral = dict(MISTRAL_7B, num_attention_heads=64)
  del mistral['num_key_value_heads']
  config = config_from_hf(mistral)
  assert (config.num_kv_heads, config.head_dim) == (8, 64)


def test_windows_that_begin_after_the_last_layer_are_not_in_use():
  window = {'use_sliding_window': True, 'sliding_window': 4096}
  hf = QWEN2_5_7B | window | {'max_window_layers': 28}
  assert config_from_hf(hf) == published.QWEN2_5_7B
  # An absent key stands for 28, too.
  del hf['max_window_layers']
  assert config_from_hf(hf) == published.QWEN2_5_7B
  with pytest.raises(ValueError, match='sliding windows are not supported'):
    config_from_hf(hf | {'num_hidden_layers': 29})
  # Mistral's is one of tokens, of which no row has more.
  wide = MISTRAL_7B | {'sliding_window': 32768}
  assert config_from_hf(wide) == config_from_hf(MISTRAL_7B)


def test_an_absent_window_of_mistral_is_one_of_4096_tokens():
  absent = {k: v for k, v in MISTRAL_7B.items() if k != 'sliding_window'}
  message = 'sliding_window=4096, which an absent key stands for: .* is null'
  with pytest.raises(ValueError, match=message):
    config_from_hf(absent)


LLAMA3 = LLAMA_3_1_8B['rope_scaling']


@pytest.mark.parametrize(
    ('hf', 'change', 'message'),
    [
        (
            QWEN2_5_7B,
            {'architectures': ['MixtralForCausalLM']},
            'MixtralForCausalLM.*Qwen2ForCausalLM, Qwen3ForCausalLM, Llama',
        ),
        (QWEN2_5_7B, {'architectures': []}, 'architectures'),
        (QWEN2_5_7B, {'architectures': None}, 'architectures'),
        (QWEN2_5_7B, {'model_type': 'qwen2_moe'}, "model_type 'qwen2_moe'"),
        (QWEN2_5_7B, {'hidden_act': 'gelu'}, "hidden_act='gelu'.*'silu'"),
        (QWEN3_8B, {'attention_bias': True}, 'attention_bias=True'),
        (LLAMA_3_1_8B, {'attention_bias': True}, 'attention_bias=True'),
        (LLAMA_3_1_8B, {'mlp_bias': True}, 'mlp_bias=True'),
        *(
            (QWEN3_8B, {key: 4}, f'{key}=4 .*only dense decoders')
            for key in (
                *('num_experts', 'num_local_experts', 'n_routed_experts'),
                *('num_experts_per_tok', 'moe_intermediate_size'),
                'shared_expert_intermediate_size',
            )
        ),
        (QWEN3_8B, {'compression_config': {}}, 'compression_config={}'),
        (QWEN2_5_7B, {'quantization_config': {}}, 'quantization_config'),
        (LLAMA_3_1_8B, {'partial_rotary_factor': 0.5}, 'partial_rotary'),
        (
            QWEN2_5_7B,
            {'use_sliding_window': True, 'max_window_layers': 20},
            'sliding windows are not supported',
        ),
        (
            MISTRAL_7B,
            {'sliding_window': 4096},
            'sliding_window=4096: .* not below max_position_embeddings, which',
        ),
        (
            QWEN3_8B,
            {'layer_types': ['full_attention', 'sliding_attention']},
            'layer_types.*sliding_attention',
        ),
        (
            LLAMA_3_1_8B,
            {'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0}},
            "rope_type 'yarn': allowed are 'default' and 'llama3'",
        ),
        (
            QWEN2_5_7B,
            {'rope_scaling': {'type': 'linear', 'factor': 2.0}},
            "rope_type 'linear'",
        ),
        (
            QWEN3_8B,
            {'rope_parameters': {'full_attention': {'rope_type': 'default'}}},
            'the same for all layers',
        ),
        (
            LLAMA_3_1_8B,
            {'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0}},
            "lacks 'low_freq_factor', 'high_freq_factor'",
        ),
        (
            LLAMA_3_1_8B,
            {'rope_parameters': LLAMA3 | {'factor': 32.0}},
            'disagree',
        ),
        (
            LLAMA_3_1_8B,
            {'rope_parameters': LLAMA3 | {'rope_theta': 1e4}},
            'rope_theta is given as',
        ),
        (
            LLAMA_3_1_8B,
            {'original_max_position_embeddings': 4096},
            'disagree on original_max_position_embeddings',
        ),
        (LLAMA_3_1_8B, {'rope_scaling': 'llama3'}, 'null and an object'),
        (LLAMA_3_1_8B, {'hidden_size': 4097}, 'not a multiple'),
        (QWEN2_5_7B, {'num_attention_heads': 0}, 'num_attention_heads 0'),
        (QWEN2_5_7B, {'hidden_size': '3584'}, "hidden_size '3584'"),
    ],
)
def test_what_would_change_the_forward_is_refused_by_name(hf, change, message):
  with pytest.raises(ValueError, match=message):
    config_from_hf(hf | change)


@pytest.mark.parametrize(
    ('hf', 'change', 'message'),
    [
        (
            QWEN3_8B,
            {'num_attention_heads': 'four'},
            "config.json: num_attention_heads 'four': allowed are integers",
        ),
        (
            QWEN2_5_7B,
            {'num_key_value_heads': 3},
            'config.json: num_attention_heads 28 must be a multiple of '
            'num_key_value_heads 3',
        ),
        (
            QWEN2_5_7B,
            {'num_hidden_layers': 1.5},
            'config.json: num_hidden_layers 1.5: ',
        ),
        (
            QWEN2_5_7B,
            {'rms_norm_eps': -1},
            'config.json: rms_norm_eps -1: allowed are numbers above 0',
        ),
        (
            QWEN2_5_7B,
            {'tie_word_embeddings': 'no'},
            "config.json: tie_word_embeddings 'no': allowed are True and False",
        ),
        (
            LLAMA_3_1_8B,
            {'rope_scaling': LLAMA3 | {'factor': 0}},
            'config.json: rope_scaling: factor 0.0: allowed are numbers above',
        ),
    ],
)
def test_a_wrong_value_is_called_by_its_name_in_the_file(hf, change, message):
  with pytest.raises(ValueError) as error:
    config_from_hf(hf | change)
  assert str(error.value).startswith(message)


@pytest.mark.parametrize('key', ['hidden_size', 'rms_norm_eps', 'vocab_size'])
def test_a_missing_key_is_named(key):
  hf = {k: v for k, v in QWEN2_5_7B.items() if k != key}
  with pytest.raises(ValueError, match=f"'{key}' is missing"):
    config_from_hf(hf)


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        (b'[]', 'not a JSON object'),
        (b'{"vocab_size": 1, "vocab_size": 2}', "duplicate keys 'vocab_size'"),
        (b'{"rms_norm_eps": NaN}', 'NaN is not a JSON number'),
        (b'{"a": ' + b'[' * 100_000, 'config.json: '),
        (b'\xff\xfe', 'not valid JSON'),
        (b'{', 'not valid JSON'),
        (b'{"vocab_size": ' + b'9' * 5_000 + b'}', 'a number of 5000 digits'),
    ],
)
def test_a_broken_config_file_is_a_value_error(tmp_path, text, message):
  (tmp_path / 'config.json').write_bytes(text)
  with pytest.raises(ValueError, match=message):
    load_config(tmp_path)


def test_odd_values_anywhere_end_in_a_config_or_a_value_error():
  odd = [None, True, 0, -1, 1.5, 1e999, 10**400, 'x', '', [], [[]], {}, [1]]
  odd += [{'rope_type': 'llama3'}, {'type': []}, {'rope_theta': {}}, LLAMA3]
  rng = random.Random(0)
  accepted = 0
  for _ in range(3_000):
    hf = dict(rng.choice(PUBLISHED)[0])
    keys = [*hf, 'rope_parameters', 'layer_types', 'head_dim', 'num_experts']
    for key in rng.sample(keys, rng.randint(1, 3)):
      if rng.random() < 0.2:
        hf.pop(key, None)
      else:
        hf[key] = rng.choice(odd)
    try:
      config_from_hf(hf)
      accepted += 1
    except ValueError:
      pass
  assert 0 < accepted < 3_000
