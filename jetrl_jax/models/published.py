"""The published shapes that a run may start from random weights.

A run from a checkpoint reads its config.json instead.
"""

import functools

from jetrl_jax.models.types import Llama3RopeScaling, ModelConfig

_qwen2_5 = functools.partial(
    ModelConfig,
    family='qwen2',
    rope_theta=1_000_000.0,
    rope_scaling=None,
    qkv_bias=True,
    qk_norm=False,
)

QWEN2_5_0_5B = _qwen2_5(
    vocab_size=151_936,
    num_layers=24,
    model_dim=896,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    ffn_dim=4_864,
    norm_eps=1e-6,
    max_position=32_768,
    tied_embeddings=True,
)

QWEN2_5_1_5B = _qwen2_5(
    vocab_size=151_936,
    num_layers=28,
    model_dim=1_536,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    ffn_dim=8_960,
    norm_eps=1e-6,
    max_position=32_768,
    tied_embeddings=True,
)

QWEN2_5_3B = _qwen2_5(
    vocab_size=151_936,
    num_layers=36,
    model_dim=2_048,
    num_heads=16,
    num_kv_heads=2,
    head_dim=128,
    ffn_dim=11_008,
    norm_eps=1e-6,
    max_position=32_768,
    tied_embeddings=True,
)

QWEN2_5_7B = _qwen2_5(
    vocab_size=152_064,
    num_layers=28,
    model_dim=3_584,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    ffn_dim=18_944,
    norm_eps=1e-6,
    max_position=131_072,
    tied_embeddings=False,
)

QWEN2_5_14B = _qwen2_5(
    vocab_size=152_064,
    num_layers=48,
    model_dim=5_120,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    ffn_dim=13_824,
    norm_eps=1e-5,
    max_position=131_072,
    tied_embeddings=False,
)

QWEN2_5_32B = _qwen2_5(
    vocab_size=152_064,
    num_layers=64,
    model_dim=5_120,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    ffn_dim=27_648,
    norm_eps=1e-5,
    max_position=131_072,
    tied_embeddings=False,
)

QWEN3_8B = ModelConfig(
    family='qwen3',
    vocab_size=151_936,
    num_layers=36,
    model_dim=4_096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_dim=12_288,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    rope_scaling=None,
    max_position=40_960,
    qkv_bias=False,
    qk_norm=True,
    tied_embeddings=False,
)

_llama3_1 = functools.partial(
    ModelConfig,
    family='llama',
    vocab_size=128_256,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=Llama3RopeScaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8_192,
    ),
    max_position=131_072,
    qkv_bias=False,
    qk_norm=False,
    tied_embeddings=False,
)

LLAMA_3_1_8B = _llama3_1(
    num_layers=32, model_dim=4_096, num_heads=32, ffn_dim=14_336
)

LLAMA_3_1_70B = _llama3_1(
    num_layers=80, model_dim=8_192, num_heads=64, ffn_dim=28_672
)
