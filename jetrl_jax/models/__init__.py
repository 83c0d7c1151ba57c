"""Tokens to log-probs: one decoder for all families."""

from jetrl_jax.models.attention import DecodeAttention, PackedAttention
from jetrl_jax.models.decoder import Decoder, variables
from jetrl_jax.models.hf.config import load_config
from jetrl_jax.models.hf.files import resolve_checkpoint
from jetrl_jax.models.hf.load import load_checkpoint, load_scales
from jetrl_jax.models.hf.save import save_checkpoint
from jetrl_jax.models.types import ModelConfig

__all__ = [
    'DecodeAttention',
    'Decoder',
    'ModelConfig',
    'PackedAttention',
    'load_checkpoint',
    'load_config',
    'load_scales',
    'resolve_checkpoint',
    'save_checkpoint',
    'variables',
]
