"""Makes the tiny Hugging Face checkpoints that tests/models compares with.

One instance of each family in float32 with random biases and norm gains, as
`transformers` saves it, and the logits that `transformers` computes. Needs
torch and transformers, which the test suite does not:

    pip install torch==2.13.0 transformers==5.24.0
    python -m tools.make_hf_goldens tests/models/hf/goldens
"""

# pyright: reportMissingImports=false

import pathlib
import sys

import numpy as np
import torch
import transformers

_BATCH, _LENGTH = 2, 48

_COMMON = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    dtype='float32',
    bos_token_id=None,
    eos_token_id=None,
)


def make_config(family: str) -> transformers.PreTrainedConfig:
  """The shape of the tiny instance of one family."""
  match family:
    case 'qwen2':
      return transformers.Qwen2Config(
          **_COMMON,
          tie_word_embeddings=True,
          rope_parameters={'rope_type': 'default', 'rope_theta': 1e6},
      )
    case 'qwen3':
      # 4 heads of 24 are not the model's 64.
      return transformers.Qwen3Config(
          **_COMMON,
          head_dim=24,
          tie_word_embeddings=False,
          rope_parameters={'rope_type': 'default', 'rope_theta': 1e6},
      )
    case 'llama':
      # Of the 8 wavelengths 6.3, 19.9, 62.8, ... the first is kept (< 32 / 4),
      # the second blended and the rest (> 32 / 1) divided by 8.
      return transformers.LlamaConfig(
          **_COMMON,
          tie_word_embeddings=False,
          rope_parameters={
              'rope_type': 'llama3',
              'rope_theta': 10_000.0,
              'factor': 8.0,
              'low_freq_factor': 1.0,
              'high_freq_factor': 4.0,
              'original_max_position_embeddings': 32,
          },
      )
    case 'mistral':
      return transformers.MistralConfig(
          **_COMMON,
          head_dim=24,
          sliding_window=None,
          tie_word_embeddings=False,
          rope_parameters={'rope_type': 'default', 'rope_theta': 1e6},
      )
  raise ValueError(f'family {family!r}')


def randomise(model: torch.nn.Module) -> None:
  """Draws every parameter so that leaving one out would show."""
  with torch.no_grad():
    for name, value in model.named_parameters():
      noise = torch.randn(value.shape)
      if 'norm' in name:
        value.copy_(1 + 0.3 * noise)
      elif name.endswith('bias'):
        value.copy_(0.5 * noise)
      elif 'embed_tokens' in name:
        value.copy_(0.2 * noise)
      else:
        value.copy_(noise / value.shape[1] ** 0.5)


def main(out: pathlib.Path) -> None:
  """Writes one folder per family: config.json, model.safetensors, logits."""
  for family in ('qwen2', 'qwen3', 'llama', 'mistral'):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        make_config(family), attn_implementation='eager'
    )
    model.eval()
    randomise(model)
    tokens = torch.randint(0, _COMMON['vocab_size'], (_BATCH, _LENGTH))
    with torch.no_grad():
      logits = model(tokens).logits
    folder = out / family
    model.save_pretrained(folder)
    np.savez_compressed(
        folder / 'logits.npz',
        tokens=tokens.numpy().astype(np.int32),
        logits=logits.numpy(),
    )
    print(family, 'logits std', float(logits.std()))


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]))
