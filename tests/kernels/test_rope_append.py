import pytest

from jetrl_jax.kernels import dispatch, rope_append
from tests.kernels_in_use import needs_mosaic


@needs_mosaic
@pytest.mark.parametrize(
    'head_dim, is_taken',
    [(32, False), (64, True), (96, False), (128, True), (256, True)],
)
def test_the_heads_that_the_kernel_takes(head_dim, is_taken):
  kernels = dispatch.select('reference').replace(rope_append='mosaic_sm90')
  with dispatch.using(kernels):
    assert rope_append.has_kernel(head_dim) is is_taken
