import pytest

from jetrl_jax.kernels import dispatch, rope_append
from tests.kernels_in_use import needs_mosaic


@needs_mosaic
@pytest.mark.parametrize(
    'head_dim, is_taken',
    [(32, False), (64, True), (96, False), (128, True), (256, True)],
)
def test_the_heads_that_mosaics_kernel_takes(monkeypatch, head_dim, is_taken):
  kernels = dispatch.select('reference').replace(rope_append='mosaic_sm90')
  for has_triton, other in ((True, 'triton'), (False, 'reference')):
    monkeypatch.setattr(dispatch, 'has_triton', lambda has=has_triton: has)
    with dispatch.using(kernels):
      name = rope_append._implementation(head_dim)
    assert name == ('mosaic_sm90' if is_taken else other)
