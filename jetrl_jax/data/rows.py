r"""Rows of data sets: JSONL, JSON, Parquet and Hugging Face data sets.

Every format becomes a list of rows (dicts), and one function turns rows into
`Example`s, so that what a column means is decided in one place. A key may
reach into a nested column with dots, which is how verl's Parquet layout is
read: `prompt_key='prompt'` (a list of {role, content}),
`answer_key='reward_model.ground_truth'`, `source_key='data_source'`.

GSM8K is `prompt_key='question', answer_key='answer'`; MATH is
`prompt_key='problem', answer_key='answer'`.
"""

import decimal
import difflib
import importlib
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from absl import logging

from jetrl_jax.core.files import user_path
from jetrl_jax.data.types import Answer, Example, Message

_FORMATS = '.jsonl, .json, .parquet or hf:<repo>[:<config>]:<split>'
# Different names that data sets have for the same column.
_SAME = (
    ('prompt', 'question', 'problem', 'query', 'instruction'),
    ('answer', 'final_answer', 'solution', 'target', 'ground_truth'),
)


Rows: TypeAlias = Iterable[Mapping[str, Any]]
Source: TypeAlias = str | os.PathLike[str] | Rows


def load_examples(
    files: Sequence[Source] | Rows,
    *,
    prompt_key: str,
    answer_key: str,
    source_key: str = '',
) -> list[Example]:
  """Reads rows from files or Hugging Face data sets, in the order given.

  Args:
    files: paths ending in .jsonl, .json (a list of rows) or .parquet, or
      'hf:<repo>:<split>' / 'hf:<repo>:<config>:<split>' (online only). Or
      rows in memory, alone or in place of a path: dicts, or a
      `datasets.Dataset`.
    prompt_key: column with the question or the list of chat messages.
    answer_key: column with the reference answer, any JSON value; '' where
      there is none. A GSM8K solution is cut to what follows its last '####'.
    source_key: column that names the data set; '' takes the file's stem or
      the repository's name, for rows in memory 'rows'.

  Returns:
    At least one example per file; ids number the rows from 0 over all files. A
    row whose answer is null or empty (MATH has some) cannot be scored: it is
    left out, and a warning counts such rows. It keeps its number, so ids do not
    depend on the rule.
    Prompts with the character NUL are kept, and a warning counts them too.

  Raises:
    ValueError: an unknown format, a file that is missing, empty or malformed,
      a missing or wrongly typed column, a missing extra.
  """
  if isinstance(files, (str, os.PathLike)):
    what = 'string' if isinstance(files, str) else 'path'
    raise ValueError(
        f'files is the {what} {str(files)!r}; pass a sequence of paths,'
        f' [{str(files)!r}].'
    )
  # A `datasets.Dataset` is no list, but one source.
  is_list = isinstance(files, (list, tuple))
  sources: list[Any] = list(files) if is_list else [files]
  if not sources:
    raise ValueError(f'files is empty; name at least one file ({_FORMATS}).')
  if is_list and all(isinstance(row, Mapping) for row in sources):
    sources = [sources]
  examples: list[Example] = []
  rows = 0
  without_answer: list[str] = []
  with_nul: list[str] = []
  for index, given in enumerate(sources):
    before = len(examples), rows
    in_memory = not isinstance(given, (str, os.PathLike))
    file = f'files[{index}]' if in_memory else os.fspath(given)
    found = _number(given, file) if in_memory else _read_rows(file)
    for where, row in found:
      id, rows = rows, rows + 1
      if answer_key and _lacks_answer(row, answer_key, where):
        without_answer.append(where)
        continue
      source = 'rows' if in_memory else _stem(file)
      if source_key:
        source = _text_at(row, source_key, f'{where}, source_key')
      example = _to_example(
          row,
          where,
          prompt_key=prompt_key,
          answer_key=answer_key,
          source=source,
          id=id,
      )
      examples.append(example)
      if any('\0' in text for text in _texts(example.prompt)):
        with_nul.append(where)
    if len(examples) == before[0]:
      empty = rows == before[1]
      raise ValueError(
          f'{file} has no rows.'
          if empty
          else f'{file}: {answer_key!r} is empty in every row.'
      )
  if without_answer:
    logging.warning(
        'Left out %d of %d rows whose %r is empty, the first at %s.',
        len(without_answer),
        rows,
        answer_key,
        without_answer[0],
    )
  if with_nul:
    logging.warning(
        '%d of %d prompts hold the character NUL, the first at %s. Text seldom'
        ' does: look whether the file is damaged or was decoded wrongly.',
        len(with_nul),
        len(examples),
        with_nul[0],
    )
  return examples


def _to_example(
    row: dict[str, Any],
    where: str,
    *,
    prompt_key: str,
    answer_key: str,
    source: str,
    id: int,
) -> Example:
  """Builds one example and checks the types of its columns."""
  prompt = column(row, prompt_key, f'{where}, prompt_key')
  if not isinstance(prompt, str):
    prompt = _check_messages(prompt, f'{where}: {prompt_key!r}')
  _check_unicode(prompt, f'{where}: {prompt_key!r}')
  answer = _answer_at(row, answer_key, where) if answer_key else ''
  if not prompt or (answer_key and answer == ''):
    empty = answer_key if prompt else prompt_key
    raise ValueError(f'{where}: {empty!r} is empty.')
  return Example(id=id, prompt=prompt, answer=answer, source=source, extra=row)


def _check_messages(value: Any, where: str) -> list[Message]:
  """Checks that `value` is a conversation: a list of {role, content}."""
  if isinstance(value, list) and all(
      isinstance(m, dict)
      and isinstance(m.get('role'), str)
      and isinstance(m.get('content'), str)
      for m in value
  ):
    return value
  raise ValueError(
      f'{where} is {_short(value)}; allowed: a string, or a list of'
      " {'role': ..., 'content': ...} with text in both."
  )


def _check_unicode(content: str | list[Message], where: str) -> None:
  """Refuses half a character: no tokenizer takes it, and no file."""
  for text in _texts(content):
    try:
      text.encode('utf-8')
    except UnicodeEncodeError as error:
      raise ValueError(
          f'{where} has {text[error.start]!r} at character {error.start}, half'
          ' of a surrogate pair; allowed: valid Unicode. Write the whole'
          ' character, or leave it out.'
      ) from error


def _texts(content: str | list[Message]) -> list[str]:
  if isinstance(content, str):
    return [content]
  return [text for m in content for text in (m['role'], m['content'])]


def column(row: dict[str, Any], key: str, where: str) -> Any:
  """Looks up `key`, or with dots a field of a nested column.

  Args:
    row: the row of a data set.
    key: 'answer', or 'reward_model.ground_truth'.
    where: the row's place, for the message.

  Raises:
    ValueError: there is no such column.
  """
  if key in row:
    return row[key]
  value: Any = row
  for part in key.split('.'):
    if not isinstance(value, dict) or part not in value:
      columns = sorted(value) if isinstance(value, dict) else []
      same = next((names for names in _SAME if part in names), ())
      near = [name for name in same if name in columns]
      near = near or difflib.get_close_matches(part, columns, n=1)
      hint = f' Did you mean {near[0]!r}?' if near else ''
      raise ValueError(
          f'{where}: no column {key!r}; columns here: {columns}.{hint}'
      )
    value = value[part]
  return value


def _text_at(row: dict[str, Any], key: str, where: str) -> str:
  value = column(row, key, where)
  if isinstance(value, bool) or not isinstance(value, (str, int, float)):
    raise ValueError(
        f'{where}: {key!r} is {_short(value)}; allowed: a string or a number.'
    )
  # Written without an exponent, which no answer has.
  if isinstance(value, float):
    return format(decimal.Decimal(repr(value)), 'f')
  return str(value)


def _answer_at(row: dict[str, Any], key: str, where: str) -> Answer:
  value = column(row, key, f'{where}, answer_key')
  if not isinstance(value, (bool, list, dict)):
    text = _text_at(row, key, f'{where}, answer_key')
    _check_unicode(text, f'{where}: {key!r}')
    return text.rsplit('####', 1)[1].strip() if '####' in text else text
  try:
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
  except (TypeError, ValueError) as error:
    raise ValueError(
        f'{where}: {key!r} is {_short(value)}; allowed: a string, a number, or'
        f' a list or object of JSON ({error}).'
    ) from error
  _check_unicode(written, f'{where}: {key!r}')
  return value


def _lacks_answer(row: dict[str, Any], answer_key: str, where: str) -> bool:
  """Whether the column of answers holds none; JSON has NaN for that."""
  try:
    value = column(row, answer_key, f'{where}, answer_key')
  except ValueError as error:
    raise ValueError(
        f"{error} Where rows have no reference answer, set answer_key to ''"
        ' (data.answer_key, or --answer_key= of evaluate).'
    ) from error
  if isinstance(value, float):
    return not math.isfinite(value)
  if isinstance(value, str):
    return not value.strip()
  return value is None or value in ([], {})


def _stem(file: str) -> str:
  if file.startswith('hf:'):
    return file.split(':')[1].rsplit('/', 1)[-1]
  return pathlib.Path(file).stem


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 80 else text[:77] + '...'


def _read_rows(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields (where the row is, the row); the format follows from the name."""
  if file.startswith('hf:'):
    rows = _read_hugging_face(file)
  else:
    path = user_path(file)
    readers = {
        '.jsonl': _read_jsonl,
        '.json': _read_json,
        '.parquet': _read_parquet,
    }
    if path.suffix not in readers:
      name = file or 'a file without a name'
      raise ValueError(f'{name}: unknown format; allowed: {_FORMATS}.')
    # Not Path.is_file, which raises on a name too long for the file system.
    if not os.path.isfile(path):
      where = '' if path.is_absolute() else f' in {pathlib.Path.cwd()}'
      raise ValueError(f'{file}: there is no such file{where}.')
    rows = readers[path.suffix](path)
  for where, row in rows:
    if not isinstance(row, dict):
      raise ValueError(
          f'{where}: a row must be an object with named columns, found'
          f' {_short(row)}.'
      )
    yield where, row


def _number(given: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields (where the row is, a copy of it) of rows in memory."""
  if isinstance(given, Mapping) or not isinstance(given, Iterable):
    raise ValueError(
        f'{name} is {_short(given)}; allowed: a path to {_FORMATS}, or rows in'
        ' memory, as a list of dicts or one split of a datasets.Dataset.'
    )
  for number, row in enumerate(given):
    if not isinstance(row, Mapping):
      raise ValueError(
          f'{name}[{number}]: a row must be a dict with named columns, found'
          f' {_short(row)}.'
      )
    yield f'{name}[{number}]', dict(row)


def _read_jsonl(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
  with path.open('rb') as lines:
    for number, line in enumerate(lines, 1):
      if line.strip():
        yield f'{path}:{number}', _parse_json(line, f'{path}:{number}')


def _read_json(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
  rows = _parse_json(path.read_bytes(), str(path))
  if not isinstance(rows, list):
    raise ValueError(
        f'{path}: expected a list of rows, found {_short(rows)}. One object'
        ' per line is the .jsonl format.'
    )
  for number, row in enumerate(rows):
    yield f'{path}[{number}]', row


def _parse_json(data: bytes, where: str) -> Any:
  try:
    return json.loads(data.decode('utf-8-sig'))
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{where}: not valid JSON in UTF-8: {error}') from error


def _read_parquet(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
  parquet = _import_extra('pyarrow.parquet', str(path))
  try:
    table = parquet.read_table(path)
  except Exception as error:
    raise ValueError(f'{path}: not a readable Parquet file: {error}') from error
  for number, row in enumerate(table.to_pylist()):
    yield f'{path}[{number}]', row


def _read_hugging_face(name: str) -> Iterator[tuple[str, Any]]:
  parts = name.split(':')
  if len(parts) not in (3, 4) or not all(parts):
    raise ValueError(
        f'{name}: write hf:<repo>:<split> or hf:<repo>:<config>:<split>,'
        " for example 'hf:openai/gsm8k:main:train'."
    )
  datasets = _import_extra('datasets', name)
  config = parts[2] if len(parts) == 4 else None
  try:
    rows = datasets.load_dataset(parts[1], config, split=parts[-1])
  except Exception as error:
    # The package raises a dozen types for "no network", "no such repository"
    # and "no such split"; all of them are the caller's to fix.
    raise ValueError(
        f'{name}: the datasets package could not load it: {error}. It needs'
        ' the network; offline, save the rows as .jsonl and name that file.'
    ) from error
  for number, row in enumerate(rows):
    yield f'{name}[{number}]', row


def _import_extra(module: str, needed_by: str) -> Any:
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ValueError(
        f'{needed_by} needs the package {module.split(".")[0]!r}, which is not'
        " installed: pip install 'jetrl_jax[data]', or pip install -e '.[data]'"
        ' in a clone.'
    ) from error
