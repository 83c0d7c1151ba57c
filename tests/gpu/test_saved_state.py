"""A state of a GPU on its way to the disk and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.checkpoint import restore
from jetrl_jax.checkpoint.manager import CheckpointManager

pytestmark = pytest.mark.gpu


def test_what_a_device_held_comes_back_to_the_bit(tmp_path):
  dtypes = ('float32', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'int32')
  values = 100 * jax.random.normal(jax.random.key(3), (1024, 1024))
  state = {dtype: values.astype(dtype) for dtype in dtypes}
  # More than 1 GiB comes to the host on another way.
  state['large'] = jnp.arange(300 * 2**20, dtype=jnp.float32)
  expected = {name: np.array(leaf) for name, leaf in state.items()}
  state = jax.tree.map(jnp.copy, state)
  like = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      state,
  )
  manager = CheckpointManager(tmp_path, keep_latest=1, keep_best=0)
  manager.save(0, state, {}, metric=None)
  manager.wait_for_copy()
  # As an update does it while the files are being written.
  jax.tree.map(lambda leaf: leaf.delete(), state)
  others = [jnp.full((64, 2**20), i, jnp.float32) for i in range(8)]
  jax.block_until_ready(others)
  manager.close()
  restored = restore.restore(tmp_path, like)
  assert restored is not None
  for name, array in expected.items():
    found = np.asarray(restored.state[name])
    assert found.dtype == array.dtype, name
    assert found.tobytes() == array.tobytes(), name
