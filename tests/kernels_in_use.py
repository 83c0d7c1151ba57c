"""Operations whose kernels a test wants, on a machine that has none."""

from jetrl_jax.kernels import dispatch


def use(monkeypatch, *operations: str) -> dispatch.Kernels:
  """Lets operations run their first implementation, all others the reference.

  Kernels must be interpreted by the test itself.
  """
  kernels = dispatch.select('reference').replace(
      **{operation: dispatch.TABLE[operation][0] for operation in operations}
  )
  monkeypatch.setattr(dispatch, 'automatic', lambda: kernels)
  return kernels
