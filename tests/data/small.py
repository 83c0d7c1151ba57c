"""A tokenizer folder small enough to be made by a test."""

import json

import tokenizers

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_tokenizer(folder, *, config=None, generation=None, **files):
  """Writes a byte-level tokenizer: ids 0..255 are bytes, 256.. are special."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  tokenizer = tokenizers.Tokenizer(
      tokenizers.models.BPE(
          vocab={c: i for i, c in enumerate(alphabet)}, merges=[]
      )
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens(['<|end|>', '<|pad|>', '<|bos|>'])
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
      single='<|bos|> $A', special_tokens=[('<|bos|>', 258)]
  )
  tokenizer.save(str(folder / 'tokenizer.json'))
  if config is None:
    config = {
        'eos_token': '<|end|>',
        'pad_token': {'content': '<|pad|>'},
        'chat_template': TEMPLATE,
    }
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  if generation is not None:
    (folder / 'generation_config.json').write_text(json.dumps(generation))
  for name, text in files.items():
    (
        folder / name.replace('_json', '.json').replace('_jinja', '.jinja')
    ).write_text(text)
  return folder
