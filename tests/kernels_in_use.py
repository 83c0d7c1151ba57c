"""Operations whose kernels a test wants, on a machine that has none."""

import jax

from jetrl_jax.kernels import dispatch

HOPPER = dispatch.Hardware('gpu', (9, 0), has_triton=True)


def as_on_hopper(monkeypatch) -> None:
  """Lets programs be traced as for a Hopper GPU; nothing can run."""
  kernels = dispatch.select(hardware=HOPPER)
  monkeypatch.setattr(dispatch, 'automatic', lambda: kernels)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')


def use(monkeypatch, *operations: str) -> dispatch.Kernels:
  """Lets operations run their first implementation, all others the reference.

  Kernels must be interpreted by the test itself.
  """
  kernels = dispatch.select('reference').replace(
      **{operation: dispatch.TABLE[operation][0] for operation in operations}
  )
  monkeypatch.setattr(dispatch, 'automatic', lambda: kernels)
  return kernels
