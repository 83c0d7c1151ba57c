"""A tokenizer from the files that a Hugging Face checkpoint carries.

Only local files are read: tokenizer.json (by the `tokenizers` package),
tokenizer_config.json (special tokens, chat template), special_tokens_map.json
(of old checkpoints), chat_template.jinja, generation_config.json and
config.json (which ids end a response). No Python code of a checkpoint is ever
run.
"""

import functools
import json
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers

from jetrl_jax.core.files import check_pointer

_FLAGS = ('lstrip', 'normalized', 'rstrip', 'single_word', 'special')
# The names that every tokenizer of transformers may have; a tokenizer adds its
# own, such as image_token.
_SPECIAL = (
    'bos_token',
    'eos_token',
    'unk_token',
    'sep_token',
    'pad_token',
    'cls_token',
    'mask_token',
)
# Texts per call. The package also keeps offsets and masks of each, which are
# large.
_AT_ONCE = 1000


def _byte_of() -> dict[str, int]:
  """Returns the byte that each character of a byte-level vocabulary is.

  Printable characters of Latin-1 are themselves; the others, in order, are the
  characters from 256 on.
  """
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printable]
  characters = [*printable, *(256 + n for n in range(len(others)))]
  return dict(zip(map(chr, characters), printable + others, strict=True))


_BYTE_OF = _byte_of()


class Tokenizer:
  """Text to ids and back.

  Attributes:
    folder: where the files are.
    eos_ids: ids that end a response, at least one. Those of
      generation_config.json (else config.json) first, then the tokenizer's
      own, since a model may stop with either.
    eos_id: the one that ends a written answer: the tokenizer's own, where it
      names one. Llama 3's generation_config.json begins with another, the end
      of a document, which no turn of its chats ends with.
    pad_id: id of the padding token; `eos_ids[0]` where none is named.
    vocab_size: largest id + 1. A model's embedding may have more rows.
    chat_template: Jinja source, '' where the folder has none.
    special_tokens: names to texts, e.g. {'eos_token': '<|im_end|>'}: those of
      every tokenizer, and those that this one adds.
    additional_special_tokens: texts of special tokens without a name.
  """

  def __init__(self, folder: str | pathlib.Path):
    """Loads the files of `folder`.

    Args:
      folder: a local folder with at least tokenizer.json.

    Raises:
      ValueError: tokenizer.json is missing or broken, no file names an
        end-of-text token, or a named token is not in the vocabulary.
    """
    self.folder = folder = pathlib.Path(folder)
    path = folder / 'tokenizer.json'
    # Not Path.is_file, which raises on a name too long for the file system.
    if not os.path.isfile(path):
      raise ValueError(
          f'{folder} has no tokenizer.json; point at the local folder of a'
          ' checkpoint that carries its (fast) tokenizer.'
      )
    try:
      self._tokenizer = tokenizers.Tokenizer.from_str(_read_text(path))
    except Exception as error:
      # The package raises bare Exception on a malformed file.
      raise ValueError(f'{path} is not a tokenizer: {error}') from error
    # A file may ask for truncation or padding of every text; ids then depend
    # on the batch, or are lost.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    config = _read_object(folder / 'tokenizer_config.json')
    self._add_listed_tokens(config.get('added_tokens_decoder') or {})
    self.vocab_size = 1 + max(self._tokenizer.get_vocab().values())
    self.special_tokens, self.additional_special_tokens = _special_tokens(
        folder, config
    )
    self.chat_template = _chat_template(folder, config)
    self.eos_ids = self._end_ids()
    eos = self.special_tokens.get('eos_token')
    self.eos_id = self.eos_ids[0] if eos is None else self._id_of(eos)
    pad = self.special_tokens.get('pad_token')
    self.pad_id = self.eos_ids[0] if pad is None else self._id_of(pad)

  @property
  def template_variables(self) -> dict[str, str | list[str]]:
    """Returns the special tokens by the names that chat templates use.

    The names are those of transformers 4's `special_tokens_map`; 5 leaves
    additional_special_tokens out.
    """
    if not self.additional_special_tokens:
      return {**self.special_tokens}
    more = list(self.additional_special_tokens)
    return {**self.special_tokens, 'additional_special_tokens': more}

  def encode(self, text: str, *, add_special_tokens: bool) -> np.ndarray:
    """Turns text into ids.

    Args:
      text: any text; special tokens written out in it become their ids.
      add_special_tokens: whether to add what the tokenizer puts around a
        text (Llama's BOS). A chat template writes those itself: pass False.

    Returns:
      int32 [length].

    Raises:
      ValueError: the text is not valid Unicode (a lone surrogate).
    """
    try:
      ids = self._tokenizer.encode(
          text, add_special_tokens=add_special_tokens
      ).ids
    except (UnicodeEncodeError, TypeError) as error:
      raise ValueError(
          f'cannot tokenise {text[:80]!r}: it is not valid Unicode (a surrogate'
          ' without its other half)'
      ) from error
    return np.asarray(ids, np.int32)

  def encode_all(
      self, texts: Sequence[str], *, add_special_tokens: bool
  ) -> Iterator[np.ndarray]:
    """Yields the ids of each text as `encode` returns them, on all cores.

    Raises:
      ValueError: when it is the turn of a text that is not valid Unicode.
    """
    for first in range(0, len(texts), _AT_ONCE):
      some = list(texts[first : first + _AT_ONCE])
      try:
        found = self._tokenizer.encode_batch_fast(
            some, add_special_tokens=add_special_tokens
        )
      except (UnicodeEncodeError, TypeError):
        # At least one of them is bad: try each by itself.
        for text in some:
          yield self.encode(text, add_special_tokens=add_special_tokens)
      else:
        for encoding in found:
          yield np.asarray(encoding.ids, np.int32)

  def decode(
      self, ids: Sequence[int] | np.ndarray, *, skip_special_tokens: bool = True
  ) -> str:
    """Turns ids into text; ids outside the vocabulary become nothing."""
    # Python's integers, because the package refuses those of NumPy.
    return self._tokenizer.decode(
        np.asarray(ids).tolist(), skip_special_tokens=skip_special_tokens
    )

  def token_bytes(self, id: int) -> bytes:
    """Returns what one token stands for, which may be part of a character."""
    piece = self._tokenizer.id_to_token(id)
    if piece is None:
      return b''
    if byte := re.fullmatch('<0x([0-9A-F]{2})>', piece):
      return bytes([int(byte[1], 16)])
    is_plain = id not in self._added_ids and self._is_byte_level
    if is_plain and all(c in _BYTE_OF for c in piece):
      return bytes(_BYTE_OF[c] for c in piece)
    return self.decode([id], skip_special_tokens=False).encode()

  @functools.cached_property
  def _added_ids(self) -> frozenset[int]:
    return frozenset(self._tokenizer.get_added_tokens_decoder())

  @functools.cached_property
  def _is_byte_level(self) -> bool:
    decoder = self._tokenizer.decoder
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

  def _add_listed_tokens(self, listed: Any) -> None:
    """Adds tokens that tokenizer_config.json alone lists, as transformers does.

    Without them a '<think>' of the template would be three tokens, and no
    longer the one that the model knows.
    """
    where = f'{self.folder / "tokenizer_config.json"}: added_tokens_decoder'
    if not isinstance(listed, dict) or not all(
        re.fullmatch(r'\d{1,9}', id, re.ASCII) and isinstance(token, dict)
        for id, token in listed.items()
    ):
      raise ValueError(f'{where} must map ids to objects.')
    known = self._tokenizer.get_added_tokens_decoder().values()
    texts = {token.content for token in known}
    for id in sorted(listed, key=int):
      token = listed[id]
      text = _content(token, self.folder)
      if text in texts:
        continue
      flags = {k: token[k] for k in _FLAGS if isinstance(token.get(k), bool)}
      self._tokenizer.add_tokens([tokenizers.AddedToken(text, **flags)])
      found = self._tokenizer.token_to_id(text)
      if found != int(id):
        raise ValueError(
            f'{where} gives {text!r} the id {id}, and added to tokenizer.json,'
            f' which lacks it, it has the id {found}; use the tokenizer.json'
            ' that belongs to this tokenizer_config.json.'
        )

  def _end_ids(self) -> tuple[int, ...]:
    """Collects the ids that end a response, see the class docstring."""
    folder = self.folder
    ids: list[int] = []
    for name in ('generation_config.json', 'config.json'):
      value = _read_object(folder / name).get('eos_token_id')
      if value is not None:
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(
            type(i) is int and 0 <= i < self.vocab_size for i in ids
        ):
          raise ValueError(
              f'{folder / name}: eos_token_id is {value}; allowed: an id or a'
              f' list of ids in [0, {self.vocab_size}).'
          )
        break
    if 'eos_token' in self.special_tokens:
      ids = [*ids, self._id_of(self.special_tokens['eos_token'])]
    if not ids:
      raise ValueError(
          f'{folder} names no end-of-text token; give eos_token in'
          ' tokenizer_config.json or eos_token_id in generation_config.json.'
      )
    return tuple(dict.fromkeys(ids))

  def _id_of(self, token: str) -> int:
    found = self._tokenizer.token_to_id(token)
    if found is None:
      raise ValueError(
          f'{self.folder / "tokenizer_config.json"} names the token {token!r},'
          ' which is not in the vocabulary of tokenizer.json.'
      )
    return found


def _read_text(path: pathlib.Path) -> str:
  """Reads UTF-8; refuses a pointer of Git LFS."""
  data = path.read_bytes()
  check_pointer(path, data)
  return data.decode('utf-8')


def _read_object(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object; a file that is not there is an empty one."""
  if not path.is_file():
    return {}
  try:
    value = json.loads(_read_text(path))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{path} is not valid JSON: {error}') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path} must hold a JSON object.')
  return value


def _content(token: Any, folder: pathlib.Path) -> str:
  """A special token is its text, or an object with the text as `content`."""
  if isinstance(token, dict):
    token = token.get('content')
  if not isinstance(token, str):
    raise ValueError(
        f'{folder / "tokenizer_config.json"}: special token {token!r} is'
        " neither text nor an object with 'content'."
    )
  return token


def _special_tokens(
    folder: pathlib.Path, config: dict[str, Any]
) -> tuple[dict[str, str], tuple[str, ...]]:
  """Finds the special tokens with a name, and those without, as transformers.

  A token with a name is an entry `..._token`, or one of extra_special_tokens
  where that is an object. The files of old checkpoints keep the names in
  special_tokens_map.json, which is read where added_tokens_decoder is missing.
  """
  legacy = {}
  if 'added_tokens_decoder' not in config:
    legacy = _read_object(folder / 'special_tokens_map.json')
  config = {**config, **legacy}
  # A setting such as add_bos_token has the same ending and is a bool.
  named = {
      name: token
      for name, token in config.items()
      if name.endswith('_token')
      and (name in _SPECIAL or isinstance(token, (str, dict)))
  }
  unnamed = config.get('additional_special_tokens') or []
  extra = config.get('extra_special_tokens') or []
  if isinstance(extra, dict):
    named |= extra
  else:
    unnamed = unnamed or extra
  if not isinstance(unnamed, list):
    raise ValueError(
        f'{folder / "tokenizer_config.json"}: additional_special_tokens is'
        f' {unnamed!r:.100}; allowed: a list of tokens.'
    )
  texts = {n: _content(t, folder) for n, t in named.items() if t is not None}
  return texts, tuple(_content(token, folder) for token in unnamed)


def _chat_template(folder: pathlib.Path, config: dict[str, Any]) -> str:
  """Finds the template: its own file, a text, or the list's 'default'."""
  path = folder / 'chat_template.jinja'
  if path.is_file():
    return path.read_text(encoding='utf-8')
  template = config.get('chat_template')
  if template is None:
    return ''
  if isinstance(template, list):
    named = {
        t['name']: t['template']
        for t in template
        if isinstance(t, dict) and 'name' in t and 'template' in t
    }
    template = named.get('default')
  if not isinstance(template, str):
    raise ValueError(
        f'{folder / "tokenizer_config.json"}: chat_template must be a text, or'
        " a list with one named 'default'."
    )
  return template
