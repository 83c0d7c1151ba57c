"""A Hugging Face folder as untrusted input: finding it, opening, parsing.

A checkpoint's index and its links are data that somebody else wrote. Every
file of a checkpoint is opened by `open_inside` and every JSON text read by
`parse_json`, so that no checkpoint can name a file outside of its folder, make
the reader wait on a pipe, or mean two things at once (duplicate keys).
"""

import io
import json
import os
import pathlib
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jetrl_jax.core.files import check_pointer, user_path

# The limit that the safetensors library puts on its own header.
MAX_JSON_BYTES = 100_000_000

# The files of a repository that a training run or an export needs.
_WANTED = (
    '*.json',
    '*.safetensors',
    'tokenizer*',
    'vocab*',
    'merges.txt',
    '*.jinja',
)
# Sub-folders hold the same model in other formats.
_UNWANTED = ('*/*', 'consolidated*')

CONFIG_FILE = 'config.json'
SINGLE_FILE = 'model.safetensors'
INDEX_FILE = 'model.safetensors.index.json'
# Files that peft writes. transformers applies an adapter in a model's folder.
_ADAPTER_FILES = (
    'adapter_config.json',
    'adapter_model.safetensors',
    'adapter_model.bin',
)
_PICKLES = ('.bin', '.pt', '.pth', '.ckpt')

_FILE_NAME = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}')
_REPO_ID = re.compile(r'[A-Za-z0-9_][\w.\-]*/[A-Za-z0-9_][\w.\-]*', re.ASCII)


def list_names(names: Iterable[Any], cap: int = 10) -> str:
  """Joins names for an error message: the first `cap`, then how many more."""
  names = list(names)
  shown = [repr(name) for name in names[:cap]]
  # A hostile name may be megabytes long.
  text = ', '.join(n if len(n) <= 200 else n[:200] + '...' for n in shown)
  more = len(names) - cap
  return f'{text} and {more} more' if more > 0 else text


def list_problems(found: Mapping[str, Sequence[Any]]) -> str:
  """Joins problems for an error message: 'N kind: names; ...', or ''.

  Args:
    found: names by the kind of trouble that they are in.
  """
  return '; '.join(
      f'{len(names)} {kind}: {list_names(names)}'
      for kind, names in found.items()
      if names
  )


def parse_json(data: bytes, what: str) -> Any:
  """Parses JSON; refuses text that two readers could read in two ways.

  Args:
    data: UTF-8 text.
    what: name of the text in error messages.

  Returns:
    Dicts, lists, strings, numbers, bools and None.

  Raises:
    ValueError: not UTF-8 or not JSON, nested too deep, NaN or Infinity, or a
      key twice in one object.
  """

  def unique(pairs):
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
      seen = set()
      again = [n for n in names if n in seen or seen.add(n)]
      raise ValueError(f'{what}: duplicate keys {list_names(again)}')
    return dict(pairs)

  def no_constant(text):
    raise ValueError(f'{what}: {text} is not a JSON number')

  def integer(text):
    # Python refuses to convert thousands of digits, without saying where.
    if len(text) > 1_000:
      raise ValueError(f'{what}: a number of {len(text)} digits')
    return int(text)

  try:
    return json.loads(
        data.decode('utf-8'),
        object_pairs_hook=unique,
        parse_int=integer,
        parse_constant=no_constant,
    )
  except (UnicodeDecodeError, json.JSONDecodeError) as error:
    raise ValueError(f'{what}: not valid JSON: {error}') from None
  except RecursionError:
    raise ValueError(f'{what}: JSON is nested too deep') from None


def check_format(folder: pathlib.Path) -> None:
  """Refuses a folder that holds something else than the weights of a model.

  Args:
    folder: the checkpoint.

  Raises:
    ValueError: an adapter, alone or beside a model; GGUF or pickled files and
      no safetensors. The message names the files and what to do.
  """
  has_model = has_file(folder, SINGLE_FILE) or has_file(folder, INDEX_FILE)
  adapter = [name for name in _ADAPTER_FILES if has_file(folder, name)]
  if adapter and has_model:
    raise ValueError(
        f'{folder} holds an adapter ({", ".join(adapter)}) beside the weights'
        ' of the model: transformers would apply it, and nothing here does.'
        ' Merge the adapter into the weights (merge_and_unload of peft, then'
        ' save_pretrained to a new folder), or move its files elsewhere to use'
        ' the model without it'
    )
  if adapter:
    raise ValueError(
        f'{folder} is an adapter ({", ".join(adapter)}) of {_base_of(folder)},'
        ' not a whole model. Load that model with the adapter, merge them'
        ' (merge_and_unload of peft), write the result with save_pretrained to'
        ' a new folder and name that'
    )
  if has_model:
    return
  names = sorted(os.listdir(folder))
  if gguf := [name for name in names if name.endswith('.gguf')]:
    raise ValueError(_of_gguf(folder, gguf[0]))
  if pickles := [name for name in names if name.endswith(_PICKLES)]:
    raise ValueError(
        f'{folder} has pickled weights alone ({list_names(pickles, 3)}), which'
        ' can run code when they are read; allowed are safetensors files.'
        ' AutoModelForCausalLM.from_pretrained(folder).save_pretrained(another)'
        ' of transformers writes them; copy the tokenizer files there too'
    )


def _base_of(folder: pathlib.Path) -> str:
  """Names the model that an adapter is for, as far as it says so."""
  name = _ADAPTER_FILES[0]
  found = None
  if has_file(folder, name):
    found = parse_json(read_inside(folder, name), str(folder / name))
  base = found.get('base_model_name_or_path') if isinstance(found, dict) else ''
  return list_names([base]) if base else 'a model that it does not name'


def _of_gguf(folder: pathlib.Path, name: str) -> str:
  return (
      f'{folder / name} is a GGUF file; allowed is a folder with {CONFIG_FILE}'
      ' and safetensors files. Name the published checkpoint that it was made'
      ' from, or convert it: AutoModelForCausalLM.from_pretrained(folder,'
      f' gguf_file={name!r}).save_pretrained(another) of transformers, and the'
      ' same with AutoTokenizer'
  )


def has_file(folder: pathlib.Path, name: str) -> bool:
  """Whether the folder lists a file (or a link, even a broken one)."""
  return os.path.lexists(folder / name)


def open_inside(folder: pathlib.Path, name: str) -> io.FileIO:
  """Opens a regular file of the folder for reading, unbuffered.

  Links are followed only to files of the folder itself and, when the folder is
  a snapshot in huggingface_hub's cache (`<repo>/snapshots/<commit>`), to
  `<repo>/blobs`, where that cache keeps the contents.

  Args:
    folder: the checkpoint's folder.
    name: a plain file name.

  Returns:
    The open file; the caller closes it.

  Raises:
    ValueError: the name is no plain file name, leads outside, or is not a
      readable regular file.
  """
  if not _FILE_NAME.fullmatch(name):
    raise ValueError(
        f'{folder}: file name {list_names([name])}: allowed are plain names '
        'of files in the folder itself'
    )
  root = folder.resolve()
  roots = [root]
  if root.parent.name == 'snapshots':
    blobs = root.parent.parent / 'blobs'
    if not blobs.is_symlink():
      roots.append(blobs)
  try:
    target = (root / name).resolve(strict=True)
  except (OSError, RuntimeError) as error:
    raise ValueError(f'{folder / name}: cannot be read: {error}') from None
  if not any(target.is_relative_to(allowed) for allowed in roots):
    raise ValueError(
        f'{folder / name}: the link leads outside of the folder; put the file'
        ' itself there'
    )
  try:
    # Non-blocking, because a named pipe would block the reader for ever.
    fd = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
  except OSError as error:
    raise ValueError(f'{folder / name}: cannot be read: {error}') from None
  if not stat.S_ISREG(os.fstat(fd).st_mode):
    os.close(fd)
    raise ValueError(f'{folder / name}: not a regular file')
  return io.FileIO(fd, 'rb')


def read_inside(folder: pathlib.Path, name: str) -> bytes:
  """Reads a whole small file of the folder; see `open_inside`.

  Raises:
    ValueError: it is too large, or a pointer of Git LFS.
  """
  with open_inside(folder, name) as file:
    size = os.fstat(file.fileno()).st_size
    if size > MAX_JSON_BYTES:
      raise ValueError(
          f'{folder / name}: {size} bytes, allowed are {MAX_JSON_BYTES}'
      )
    data = file.read()
  check_pointer(folder / name, data)
  return data


def resolve_checkpoint(path_or_repo_id: str) -> pathlib.Path:
  """Finds the folder of a checkpoint, downloading it when it is a repo id.

  An existing folder always wins and touches no network.

  Args:
    path_or_repo_id: a local folder, or a Hugging Face id 'organisation/name'.

  Returns:
    The folder that holds config.json and the safetensors files.

  Raises:
    ValueError: neither a folder nor an id, or the id cannot be had (offline
      and not in the local cache, unknown, or no access).
  """
  path = user_path(path_or_repo_id)
  # Not Path.is_dir, which raises on a name too long for the file system.
  if os.path.isdir(path):
    return path
  if path.suffix == '.gguf' and os.path.exists(path):
    raise ValueError(_of_gguf(path.parent, path.name))
  if os.path.isfile(path):
    raise ValueError(
        f'checkpoint {path_or_repo_id!r} is a file; name the folder that holds'
        f' it, {str(path.parent)!r}'
    )
  if os.path.exists(path) or not _REPO_ID.fullmatch(path_or_repo_id):
    raise ValueError(
        f'checkpoint {path_or_repo_id!r}: no such folder; allowed are a local '
        "folder and a Hugging Face id 'organisation/name'"
    )
  # Imported here: it takes a while, and a local folder needs none of it.
  import huggingface_hub
  import huggingface_hub.errors

  try:
    return pathlib.Path(
        huggingface_hub.snapshot_download(
            path_or_repo_id,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
        )
    )
  except (OSError, huggingface_hub.errors.HfHubHTTPError) as error:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise ValueError(
        f'checkpoint {path_or_repo_id!r}: no such folder here, and as a '
        f'Hugging Face id it cannot be downloaded ({reason}); give a local '
        'folder, or check the network and the id'
    ) from error
