import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.fp8 import formats


@pytest.mark.parametrize('dtype', formats.FORMATS.values())
def test_the_maximum_is_the_largest_finite_of_all_256_values(dtype):
  values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
  assert formats.format_max(dtype) == values[np.isfinite(values)].max()


def test_the_maxima_follow_from_the_bits():
  # E4M3 has no infinity: 0 1111 110 = 2^(15-7) * (1 + 6/8) = 448.
  # E5M2 has one, at exponent 31: 0 11110 11 = 2^(30-15) * (1 + 3/4) = 57344.
  assert formats.format_max(formats.E4M3) == 2.0**8 * 1.75 == 448
  assert formats.format_max(formats.E5M2) == 2.0**15 * 1.75 == 57344


def test_a_type_and_its_dtype_have_the_same_maximum():
  assert formats.format_max(jnp.dtype('float8_e4m3fn')) == 448
