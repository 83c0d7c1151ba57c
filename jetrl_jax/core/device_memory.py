"""How much of a GPU's memory a command takes, and the error if it is full."""

import os
import re

# The driver and libraries need the rest of a GPU's memory.
USABLE = 0.95
# In the order of their cost, the cheapest first.
REMEDIES = (
    'a lower trainer.micro_batch_size, or trainer.packed_rows=0 where rows are'
    ' long (activations), a lower rollout.num_slots, rollout.kv_cache_tokens or'
    ' lengths (KV caches), model.remat=full, model.master_dtype=bfloat16 with'
    ' optim.master_rounding=stochastic, more devices (mesh.fsdp)'
)
# XLA's message on a GPU; on a CPU it comes after 'INTERNAL: Error dispatching'.
_FULL = re.compile(r'^RESOURCE_EXHAUSTED|Out of memory allocating')
# JAX reads either of these and refuses both.
_FRACTIONS = 'XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION'


def take_most() -> None:
  """Lets JAX take `USABLE` of a GPU's memory; its default is three quarters.

  A share that the environment sets has priority. Call this before JAX first
  looks for devices.
  """
  if not any(os.environ.get(name) for name in _FRACTIONS):
    os.environ[_FRACTIONS[0]] = str(USABLE)


def explained(error: Exception) -> str:
  """Returns an error's text, with advice if memory ran out, a GPU's or not."""
  text = str(error)
  if not (isinstance(error, MemoryError) or _FULL.search(text)):
    return text
  first = text.splitlines()[0] if text else 'no memory is left'
  return (
      f'{first}\nThe memory is full. What helps: {REMEDIES}. python -m'
      ' jetrl_jax.main --dry_run with the same --config prints what each phase'
      ' of a run needs'
  )
