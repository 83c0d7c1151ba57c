"""Text to arrays: rows, tokenizer, chat template, and the order of prompts."""

from jetrl_jax.data.chat_template import (
    ChatFormat,
    ChatRenderer,
    PlainFormat,
    PromptFormat,
    render_chat,
)
from jetrl_jax.data.dataset import PromptDataset, PromptSampler
from jetrl_jax.data.rows import load_examples
from jetrl_jax.data.tokenizer import Tokenizer
from jetrl_jax.data.types import Example, Prompt

__all__ = [
    'ChatFormat',
    'ChatRenderer',
    'Example',
    'PlainFormat',
    'Prompt',
    'PromptDataset',
    'PromptFormat',
    'PromptSampler',
    'Tokenizer',
    'load_examples',
    'render_chat',
]
