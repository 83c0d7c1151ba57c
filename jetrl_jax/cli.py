"""All commands under one name: jetrl_jax train --config=quickstart.

`jetrl_jax COMMAND ...` is `python -m jetrl_jax.MODULE ...`, from any folder.
"""

import difflib
import importlib.metadata
import os
import runpy
import sys

# Module, and what it does in a sentence.
COMMANDS = {
    'train': (
        'main',
        'Trains a policy with GRPO; --dry_run says what that would need.',
    ),
    'sft': ('sft', 'Trains on written answers: a warm start for train.'),
    'evaluate': (
        'evaluate',
        'Measures the accuracy of a run or a checkpoint on questions.',
    ),
    'export': ('export', 'Writes a Hugging Face checkpoint, bfloat16 or FP8.'),
    'report': ('report', 'Writes a run, or several, as one HTML page.'),
    'serve': ('serve', "Serves a policy over HTTP, as OpenAI's API."),
    'ask': ('serve.ask', 'Asks a server.'),
    'mismatch': (
        'mismatch',
        'Splits what rollout and training disagree in by its causes.',
    ),
}
_HELP = ('-h', '--help', '-help', 'help')


def main() -> None:
  """Runs the command that the first argument names."""
  arguments = sys.argv[1:]
  if not arguments or arguments[0] in _HELP:
    print(_usage())
    return
  if arguments[0] == '--version':
    print(f'jetrl_jax {importlib.metadata.version("jetrl_jax")}')
    return
  command, *rest = arguments
  if command not in COMMANDS:
    sys.exit(f'error: {_unknown(command)}')
  # A script searches its own folder for modules. `python -m` also searches the
  # current folder, which holds the user's own modules.
  if not {'', os.getcwd()} & set(sys.path):
    sys.path.append(os.getcwd())
  sys.argv[1:] = rest
  module = f'jetrl_jax.{COMMANDS[command][0]}'
  try:
    runpy.run_module(module, run_name='__main__', alter_sys=True)
  except SystemExit as end:
    # absl ends with 1 after it has shown the help.
    asked = any(argument in _HELP[:3] for argument in rest)
    if asked and end.code == 1:
      sys.exit(0)
    raise


def _usage() -> str:
  width = max(map(len, COMMANDS))
  rows = [f'  {name:{width}}  {words}' for name, (_, words) in COMMANDS.items()]
  return '\n'.join(
      [
          'jetrl_jax COMMAND [--flag=value ...]',
          '',
          *rows,
          '',
          'jetrl_jax COMMAND --help lists the flags of a command. To start:',
          '  jetrl_jax train --config=quickstart',
      ]
  )


def _unknown(command: str) -> str:
  """Says which command may have been meant."""
  modules = {module: name for name, (module, _) in COMMANDS.items()}
  known = [*COMMANDS, *modules]
  near = difflib.get_close_matches(command, known, n=1)
  meant = modules.get(near[0], near[0]) if near else ''
  hint = f' Did you mean {meant!r}?' if meant else ''
  return f'there is no command {command!r}.{hint} Known: {", ".join(COMMANDS)}'


if __name__ == '__main__':
  main()
