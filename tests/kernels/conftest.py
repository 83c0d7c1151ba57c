"""What every test of a kernel asks for."""

import pytest


@pytest.fixture(autouse=True)
def no_race(capsys):
  """Mosaic's interpreter looks for races, and only prints what it finds."""
  yield
  assert 'RACE DETECTED' not in capsys.readouterr().out
