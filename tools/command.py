"""What the command lines of tools/ and study/ share."""

import functools
import sys
from collections.abc import Callable


def in_one_sentence(main: Callable[[], None]) -> Callable[[], None]:
  """Answers what a user can cause with one sentence, not with a traceback."""

  @functools.wraps(main)
  def run() -> None:
    try:
      main()
    except (ValueError, OSError) as error:
      sys.exit(f'error: {error}')

  return run


def whole_numbers(flag: str, text: str) -> tuple[int, ...]:
  """Returns the numbers of a flag such as --seeds=1,2,3.

  Raises:
    ValueError: one is no whole number.
  """
  try:
    return tuple(int(number) for number in text.split(','))
  except ValueError as error:
    raise ValueError(
        f'--{flag}={text} must be whole numbers by comma, such as 1,2,3'
    ) from error
