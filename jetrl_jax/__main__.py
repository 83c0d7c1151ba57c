"""All commands: python -m jetrl_jax train --config=quickstart."""

from jetrl_jax.cli import main

if __name__ == '__main__':
  main()
