"""The command line: --config=FILE, --config.section.name=value, --workdir.

FILE may be the name of an example config, such as quickstart.

A config file is the user's code and can raise anything. A mistake in it, or in
a flag, is answered with one sentence and never with a traceback. The sentence
names the place and, for an unknown name, the nearest known one.
"""

import difflib
import os
import pathlib
import re
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags
from ml_collections.config_flags import tuple_parser

from jetrl_jax.config import examples, sections
from jetrl_jax.config import presets as config_presets
from jetrl_jax.config import schema as config_schema
from jetrl_jax.core import device_memory, launchers, processes
from jetrl_jax.metrics.console import show_own_sentences

# Flags of a command without a config file: name, how it is defined, default,
# what it is.
Table: TypeAlias = tuple[tuple[str, Callable, Any, str], ...]

# The exit status that a shell gives to a command that SIGINT ended.
_STOPPED = 130
# --help shows the flags of the command's own module. After this call, flags
# that are defined here count as flags of the caller's module.
flags.disclaim_key_flags()


class _LastTuple(flags.ArgumentParser):
  """Reads a tuple.

  A flag with ml_collections' own parser collects the tuples of all times that
  it is given. With any other parser the last one holds, as for scalars.
  """

  def parse(self, argument: Any) -> tuple:
    """Returns the tuple that a flag's text says."""
    return tuple_parser.TupleParser().parse(argument)

  def flag_type(self) -> str:
    """Returns the type's name, for --help."""
    return 'tuple'


def define(values: flags.FlagValues = flags.FLAGS) -> None:
  """Defines --config and its overrides."""
  config_flags.register_flag_parser_for_type(tuple, _LastTuple())
  config_flags.DEFINE_config_file(
      'config',
      None,
      'Path of a config file, e.g. configs/quickstart.py, or the name of an'
      f' example: {", ".join(examples.names())}. --config.SECTION.NAME=value'
      ' overrides any setting, e.g. --config.optim.lr=1e-6;'
      ' docs/configuration.md lists them.',
      flag_values=values,
  )
  # Without this the flag would count as one of ml_collections.
  flags.declare_key_flag('config', values)


def load(values: flags.FlagValues = flags.FLAGS) -> ml_collections.ConfigDict:
  """Returns the config of the flag, its names checked.

  Raises:
    ValueError: a name that is no setting, or a setting that the config lacks;
      see `presets.resolve`.
  """
  flag = values['config']
  config: Any = flag.value
  config_schema.check(config, sections.get_config())
  return config_presets.resolve(
      config, chosen=config_flags.get_override_values(flag)
  )


def file() -> pathlib.Path:
  """Returns the path of the config file."""
  return pathlib.Path(config_flags.get_config_filename(flags.FLAGS['config']))


def make_folder(flag: str, folder: pathlib.Path) -> None:
  """Makes the folder that a flag names, before anything is computed for it.

  Raises:
    ValueError: nothing can be written there.
  """
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
      pass
  except OSError as error:
    raise ValueError(
        f'--{flag}={folder} cannot be written: {error.strerror}'
    ) from error


def run(main: Callable[[], None], *, several: bool = False) -> None:
  """Parses the command line and calls `main`.

  Args:
    main: the command.
    several: whether it can run as several processes.
  """
  flags.mark_flag_as_required('config')
  app.run(_in_one_sentence(main, several), flags_parser=_parse)


def run_plain(
    main: Callable[[dict[str, Any]], None],
    table: Table,
    required: list[str],
    *,
    several: bool = False,
) -> None:
  """Does what `run` does for a command without a config file.

  Args:
    main: is called with the value of every flag by name.
    table: its flags; they are defined here, because they are global.
    required: names of those that have to be given.
    several: whether it can run as several processes.
  """
  for name, define_one, default, text in table:
    define_one(name, default, text)
  flags.mark_flags_as_required(required)

  def call() -> None:
    main({name: flags.FLAGS[name].value for name, *_ in table})

  app.run(_in_one_sentence(call, several), flags_parser=_parse)


def said(error: Exception) -> str:
  """Says what absl found wrong; of a missing flag also its purpose."""
  twice = re.match(r'flag --(\w+)=(.*): already defined as (.*)', str(error))
  if twice:
    return (
        f'--{twice[1]} is given twice, as {twice[3]!r} and {twice[2]!r}; give'
        ' it once: several values are a call each'
    )
  left_out = re.findall(r'Flag --(\w+) must have a value', str(error))
  if not left_out:
    return str(error)
  helps = {
      name: (flags.FLAGS[name].help or '').rstrip('.') for name in left_out
  }
  return '; '.join(f'--{name} is missing ({helps[name]})' for name in helps)


def _in_one_sentence(
    main: Callable[[], None], several: bool
) -> Callable[[list[str]], None]:
  """Prints an error that a user can cause as one sentence.

  And Ctrl-C where nobody waits for it: while a command starts, or in one that
  saves nothing on the way.
  """

  def call(argv: list[str]) -> None:
    del argv  # absl has parsed all flags already.
    show_own_sentences()
    device_memory.take_most()
    try:
      _join(several)
      main()
      processes.finish()
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
      logging.debug('Traceback:', exc_info=True)
      _end_all(device_memory.explained(error), error)
      sys.exit(f'error: {device_memory.explained(error)}')
    except KeyboardInterrupt:
      _end_all('stopped by SIGINT')
      print('Stopped by SIGINT; what was not saved is lost.', file=sys.stderr)
      sys.exit(_STOPPED)
    except SystemExit:
      processes.finish()
      raise
    except BaseException:
      if processes.count() > 1:
        _end_all(traceback.format_exc())
      raise

  return call


def _join(several: bool) -> None:
  """Joins the processes that the launcher started; only the first prints."""
  if not several:
    launchers.check_alone()
    return
  processes.start()
  if not processes.is_first():
    sys.stdout = open(os.devnull, 'w', encoding='utf-8')
    # Process 0 prints the warnings of all processes.
    logging.get_absl_handler().addFilter(lambda record: False)


def _end_all(why: str, error: Exception | None = None) -> None:
  """Ends all processes with the reason why this one ends, if several."""
  if processes.count() == 1:
    return
  if isinstance(error, jax.errors.JaxRuntimeError) and not str(
      error
  ).startswith('RESOURCE_EXHAUSTED'):
    # A collective fails when a peer has died; the watch finds out which one.
    processes.verdict()
  processes.fail(why)


def _parse(argv: list[str]) -> list[str]:
  file = None
  if 'config' in flags.FLAGS:
    argv = _with_file(argv)
    file = _config_file(argv)
  if file is not None:
    if file.is_dir():
      sys.exit(
          f'error: --config={file} is a folder; name a config file, such as'
          ' configs/quickstart.py'
      )
    if not file.is_file():
      sys.exit(f'error: --config={file}: {_missing(file)}')
    examples.let_import_configs(file)
  try:
    left = flags.FLAGS(argv)[1:]
  except Exception as error:
    sys.exit(f'error: {_sentence(argv, file, error)}')
  if file is not None:
    made = flags.FLAGS['config'].value
    if not isinstance(made, ml_collections.ConfigDict):
      sys.exit(f'error: {_no_config(file, made)}')
  if left:
    known = config_schema.names(flags.FLAGS.config) if file else []
    hint = _as_override(left[0], known)
    sys.exit(f'error: unknown arguments {left}{hint}')
  return argv[:1]


def _sentence(
    argv: list[str], file: pathlib.Path | None, error: Exception
) -> str:
  """Says what is wrong with the command line or the config file."""
  if file is None:
    overrides = [a for a in argv if re.match(r'--?config\.', a)]
    if overrides and 'config' in flags.FLAGS:
      return (
          f'{overrides[0]} overrides a config, and none is named; name one as'
          ' well, such as --config=quickstart'
      )
    return said(error)
  for argument in argv:
    if re.match(r'--?config(=|$)', argument):
      break
    if re.match(r'--?config\.', argument):
      return f'{argument} stands before --config; give --config first'
  for cause in _chain(error):
    frames = traceback.extract_tb(cause.__traceback__)
    inside = [f for f in frames if _is(file, f.filename)]
    if inside:
      return f'{file}:{inside[-1].lineno}: {_of_file(cause, inside[-1].line)}'
  try:
    made = runpy.run_path(str(file))['get_config']()
    if isinstance(made, dict):
      return _no_config(file, made)
    known = config_schema.names(made)
  except SyntaxError as wrong:  # No line has run, so no frame is in the file.
    return f'{file}:{wrong.lineno}: {type(wrong).__name__}: {wrong.msg}'
  except (AttributeError, KeyError, TypeError):
    return (
        f'{file} has no function get_config(), without parameters, that returns'
        ' a config; configs/quickstart.py shows one'
    )
  for argument in argv:
    name = re.match(r'--?config\.([\w.]+)', argument)
    if name and not any(f'{k}.'.startswith(f'{name[1]}.') for k in known):
      return f'{argument}: {config_schema.unknown_name(name[1], known)}'
    unknown = isinstance(error, flags.UnrecognizedFlagError)
    if unknown and argument.lstrip('-').partition('=')[0] == error.flagname:
      return f'{error}{_as_override(argument, known)}'
  return str(error).replace(
      "('Non-boolean argument to boolean flag', ", '(allowed: True, False; not '
  )


def _no_config(file: pathlib.Path, made: Any) -> str:
  """Says what a config file returned in place of a config."""
  return (
      f'{file}: get_config() returns a {type(made).__name__}; allowed is the'
      ' ConfigDict of configs/base.py: get_config(), with changes'
  )


def _as_override(argument: str, known: list[str]) -> str:
  """Says what is here in the place of `name=value` of verl, TRL or Tunix."""
  name, equals, value = argument.lstrip('-+').partition('=')
  if found := config_schema.elsewhere(name):
    return f'; {found}'
  meant = config_schema.counterpart(name, known)
  return f'; did you mean --config.{meant}={value}?' if equals and meant else ''


def _of_file(error: BaseException, line: str | None) -> str:
  """Says what a line of a config file did wrong."""
  assigned = re.match(r'\w+\.([\w.]+)\s*=', line or '')
  if isinstance(error, AttributeError) and assigned:
    known = config_schema.names(sections.get_config())
    if assigned[1] not in known:
      return config_schema.unknown_name(assigned[1], known)
  return f'{type(error).__name__}: {error}'


def _with_file(argv: list[str]) -> list[str]:
  """Returns the arguments with the file of an example in place of its name."""
  value = _config_file(argv)
  if value is None or value.exists() or str(value) not in examples.names():
    return argv
  names, path = ('--config', '-config'), examples.config_file(str(value))
  changed = list(argv)
  for i, argument in enumerate(argv):
    if argument in [f'{name}={value}' for name in names]:
      changed[i] = f'--config={path}'
    elif argument == str(value) and argv[i - 1] in names:
      changed[i] = str(path)
  return changed


def _missing(file: pathlib.Path) -> str:
  """Says that a config file is not there, and which example was meant."""
  known = examples.names()
  if file.parent != pathlib.Path() or file.suffix:
    meant = file.stem in known
    hint = f'; --config={file.stem} works in any folder' if meant else ''
    return f'there is no such file{hint}'
  near = difflib.get_close_matches(file.name, known, n=1)
  hint = f'; did you mean {near[0]!r}?' if near else '.'
  return (
      f'there is no such file, and no example of that name{hint} Examples:'
      f' {", ".join(known)}'
  )


def _config_file(argv: list[str]) -> pathlib.Path | None:
  """Returns the path given with --config, in either spelling."""
  for i, argument in enumerate(argv):
    name, equals, value = argument.partition('=')
    if name in ('--config', '-config'):
      rest = argv[i + 1 : i + 2] if not equals else [value]
      return pathlib.Path(rest[0]) if rest else None
  return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
  while error is not None:
    yield error
    error = error.__cause__ or error.__context__


def _is(file: pathlib.Path, name: str) -> bool:
  return pathlib.Path(name).resolve() == file.resolve()
