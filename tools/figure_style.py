"""How the figures of docs/ look: fonts, colours, sizes, in one place.

Whoever draws one calls `use()` first and `save(figure, path)` last:
benchmarks/plot_*.py, study/figures.py and study/cell_figures.py. The report of
a run has its own, in HTML.
"""

import pathlib
from typing import Any, Literal

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart.
BLUE, BLACK, VERMILLION, ORANGE = '#0072B2', '#000000', '#D55E00', '#E69F00'
SKY, PURPLE, GREEN, GREY = '#56B4E9', '#CC79A7', '#009E73', '#7F7F7F'
COLORS = (BLUE, BLACK, VERMILLION, ORANGE, SKY, PURPLE, GREEN, GREY)
# A dash for each: lines are told apart in grey as well.
DASHES = ('-', '-', '--', '-.', ':', '--', '-.', ':')
# Behind what it marks: a range that papers report, a margin.
SHADE = {'color': GREY, 'alpha': 0.15, 'lw': 0}
_SETTINGS: dict[Any, Any] = {
    'font.family': 'DejaVu Sans',  # It comes with matplotlib.
    'font.size': 10,
    'axes.titlesize': 10,
    'axes.labelsize': 10,
    'figure.titlesize': 10,
    'xtick.labelsize': 9,
    'ytick.labelsize': 9,
    'legend.fontsize': 9,
    'legend.frameon': False,
    'axes.prop_cycle': cycler(color=COLORS),
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'grid.alpha': 0.3,
    'lines.linewidth': 1.5,
    'lines.markersize': 5,
    'errorbar.capsize': 3,
    'figure.constrained_layout.use': True,
    'savefig.dpi': 110,
}


def use() -> None:
  """Sets matplotlib's settings for the figures that follow."""
  plt.rcdefaults()
  plt.rcParams.update(_SETTINGS)


def lines(names: list[str]) -> dict[str, dict[str, str]]:
  """Returns name -> colour and dash of its line; the ninth is as the first."""
  return {
      name: {'color': COLORS[i % 8], 'ls': DASHES[i % 8]}
      for i, name in enumerate(names)
  }


def without_grid(axes: Axes, *, along: Literal['x', 'y']) -> None:
  """Takes the grid away that is no help: a bar's length needs one direction."""
  axes.grid(False, axis=along)


def save(figure: Figure, path: str | pathlib.Path) -> None:
  """Writes a figure, without the version that would change its bytes."""
  figure.savefig(path, metadata={'Software': None})
  plt.close(figure)
