"""Saves each step's rollout on disk, compactly and to the bit.

Each step is one zlib-compressed .npz file, in which all sequences are
concatenated and offsets separate them. An update on a loaded file must give the
same gradient, so nothing is rounded. mu and pi often agree on a token, so
`log_mu` is stored as the bits in which it differs from `logprobs`; these
compress well.
"""

import contextlib
import os
import pathlib
import struct
import zipfile
import zlib
from collections.abc import Sequence

import numpy as np

from jetrl_jax.rl.types import Completion

_EXTRA = 'extra/'
# Per-token fields of a completion.
_DTYPES: dict[str, type] = {
    'tokens': np.int32,
    'weight_version': np.int32,
    'sampled': np.bool_,
    'log_mu': np.float32,
    'logprobs': np.float32,
}


def save_rollouts(
    path: str | os.PathLike,
    completions: Sequence[Completion],
    extra: dict[str, np.ndarray],
) -> None:
  """Writes the completions of one step atomically.

  Args:
    path: the file, e.g. `rollouts/12.npz`; a missing folder is created.
    completions: the step's responses; loading returns the same order.
    extra: name -> array [number of completions, ...] of booleans, integers or
      floats, such as rewards and advantages.

  Raises:
    ValueError: an array of a completion has another length or dtype than
      `Completion` says, or an extra array does not fit.
  """
  for completion in completions:
    _check(completion)
  flat = {
      name: _flat([vars(c)[name] for c in completions], dtype)
      for name, dtype in _DTYPES.items()
  }
  bits, mu_bits = (flat.pop(n).view(np.uint32) for n in ('logprobs', 'log_mu'))
  columns = {
      'prompt_id': np.array([c.prompt_id for c in completions], np.int64),
      'sample': np.array([c.sample for c in completions], np.int64),
      'finish_reason': np.array([c.finish_reason for c in completions], 'U'),
      'prompt_ends': _ends([c.prompt_tokens for c in completions]),
      'ends': _ends([c.tokens for c in completions]),
      'prompt_tokens': _flat([c.prompt_tokens for c in completions], np.int32),
      **flat,
      'extra': np.array(list(extra), 'U'),
  }
  columns = {name: _narrow(column) for name, column in columns.items()}
  columns |= {'logprob_bits': bits, 'log_mu_xor_logprob_bits': bits ^ mu_bits}
  for name, array in extra.items():
    array = np.asarray(array)
    if array.dtype.kind not in 'biuf' or array.shape[:1] != (len(completions),):
      raise ValueError(
          f'extra array {name} is {array.dtype}{list(array.shape)}; allowed: '
          f'booleans, integers or floats of length {len(completions)}'
      )
    columns[_EXTRA + name] = array
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f'{path.name}.tmp')
  try:
    with open(temporary, 'wb') as file:
      np.savez_compressed(file, allow_pickle=False, **columns)
      file.flush()
      os.fsync(file.fileno())
    os.rename(temporary, path)
  except BaseException:
    # The disk may be full, so the partial file is removed.
    with contextlib.suppress(OSError):
      temporary.unlink()
    raise


def load_rollouts(
    path: str | os.PathLike,
) -> tuple[list[Completion], dict[str, np.ndarray]]:
  """Returns the rollout that `save_rollouts` wrote, to the bit.

  Args:
    path: the file.

  Returns:
    (completions, extra arrays).

  Raises:
    ValueError: the file is missing or damaged (its CRCs are checked).
  """
  try:
    # numpy stops reading at an array's end and may never check its CRC.
    with zipfile.ZipFile(path) as archive:
      damaged = archive.testzip()
    if damaged is not None:
      raise ValueError(f'{damaged} differs from its CRC')
    with np.load(path, allow_pickle=False) as file:
      columns = {name: file[name] for name in file.files}
    return _completions(columns), {
        str(name): columns[_EXTRA + str(name)] for name in columns['extra']
    }
  # A damaged archive can make the readers raise any of these.
  except (
      OSError,
      ValueError,
      LookupError,
      EOFError,
      RuntimeError,
      struct.error,
      zipfile.BadZipFile,
      zlib.error,
  ) as error:
    raise ValueError(f'{path} cannot be read as rollouts: {error!r}') from error


def _completions(columns: dict[str, np.ndarray]) -> list[Completion]:
  """Cuts the flat columns into completions."""
  bits = columns['logprob_bits']
  flat = {
      'tokens': columns['tokens'].astype(np.int32),
      'weight_version': columns['weight_version'].astype(np.int32),
      'sampled': columns['sampled'],
      'logprobs': bits.view(np.float32),
      'log_mu': (bits ^ columns['log_mu_xor_logprob_bits']).view(np.float32),
  }
  parts = {name: _split(flat[name], columns['ends']) for name in _DTYPES}
  prompts = _split(
      columns['prompt_tokens'].astype(np.int32), columns['prompt_ends']
  )
  return [
      Completion(
          prompt_id=int(columns['prompt_id'][i]),
          sample=int(columns['sample'][i]),
          prompt_tokens=prompts[i],
          finish_reason=str(columns['finish_reason'][i]),
          episode=None,
          **{name: arrays[i] for name, arrays in parts.items()},
      )
      for i in range(len(columns['prompt_id']))
  ]


def _check(completion: Completion) -> None:
  """Raises an error if an array would not be loaded as it is."""
  length = len(completion.tokens)
  wanted = {'prompt_tokens': (np.int32, len(completion.prompt_tokens))}
  wanted |= {name: (dtype, length) for name, dtype in _DTYPES.items()}
  for name, (dtype, size) in wanted.items():
    array = vars(completion)[name]
    if array.dtype != dtype or array.shape != (size,):
      raise ValueError(
          f'{name} of prompt {completion.prompt_id}, sample '
          f'{completion.sample} is {array.dtype}{list(array.shape)}; allowed: '
          f'{np.dtype(dtype)}[{size}]'
      )


def _narrow(array: np.ndarray) -> np.ndarray:
  """Returns integers in the smallest dtype that holds them; others as is."""
  if array.dtype.kind != 'i' or array.size == 0:
    return array
  low, high = int(array.min()), int(array.max())
  dtype = np.result_type(np.min_scalar_type(low), np.min_scalar_type(high))
  # 2**63 and above next to a negative number would promote to float.
  return array.astype(dtype) if dtype.kind in 'iu' else array


def _flat(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
  return np.concatenate([np.zeros(0, dtype), *arrays])


def _ends(arrays: list[np.ndarray]) -> np.ndarray:
  return np.cumsum([len(array) for array in arrays], dtype=np.int64)


def _split(flat: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
  return np.split(flat, ends.astype(np.int64))[:-1]
