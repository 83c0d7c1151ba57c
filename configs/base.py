"""Every default of a run. Other configs start from here and set differences.

Names are those of verl and TRL where these have one. A misspelt name is
refused, in a config file and on the command line
(`--config.optim.lr=1e-6`). docs/configuration.md lists them all with their
defaults and meanings; jetrl_jax/config/sections.py says which dataclass has
which, and is where these are read from.
"""

from jetrl_jax.config.sections import get_config

__all__ = ['get_config']
