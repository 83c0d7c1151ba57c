"""What launchers say of the processes that they start."""

import pytest

from jetrl_jax.core import launchers
from tests import launched


@pytest.fixture
def environment(monkeypatch):
  for name in (launchers.ADDRESS, launchers.COUNT, launchers.RANK):
    monkeypatch.delenv(name, raising=False)
  for name in ('SLURM_STEP_NODELIST', 'SLURM_PROCID', 'SLURM_NTASKS'):
    monkeypatch.delenv(name, raising=False)
  return monkeypatch


@pytest.mark.parametrize(
    'found, count',
    [
        ({}, 1),
        (launched.by_hand(1, 4, 1234), 4),
        (launched.srun(0, 2, 61441), 2),
        # A batch script that calls python without srun is one process.
        ({'SLURM_NTASKS': '8', 'SLURM_PROCID': '0'}, 1),
        ({'OMPI_MCA_orte_hnp_uri': 'x', 'OMPI_COMM_WORLD_SIZE': '3'}, 3),
        # Asked for one.
        (launched.srun(0, 2, 61441) | {launchers.COUNT: '1'}, 1),
    ],
)
def test_the_launchers_variables_say_how_many_processes_there_are(
    environment, found, count
):
  for name, value in found.items():
    environment.setenv(name, value)
  assert launchers.launched() == count


@pytest.mark.parametrize(
    'found, message',
    [
        ({launchers.COUNT: '2'}, 'JAX_PROCESS_ID is not set, but'),
        ({launchers.ADDRESS: 'a:1'}, 'neither JAX_NUM_PROCESSES and'),
        (launched.by_hand(2, 2, 1), 'JAX_PROCESS_ID is 2; allowed .* 0 to 1'),
        (
            launched.by_hand(0, 2, 1) | {launchers.COUNT: 'two'},
            "JAX_NUM_PROCESSES is 'two'; allowed: integers",
        ),
    ],
)
def test_variables_that_cannot_be_are_refused(environment, found, message):
  for name, value in found.items():
    environment.setenv(name, value)
  with pytest.raises(ValueError, match=message):
    launchers.launched()


@pytest.mark.parametrize(
    'variables, local, ids',
    [
        # All GPUs of the host are visible, and tasks share them.
        ({'CUDA_VISIBLE_DEVICES': '0,1,2,3'}, (1, 2), [2, 3]),
        ({'CUDA_VISIBLE_DEVICES': '0,1,2,3'}, (0, 1), [0, 1, 2, 3]),
        # Slurm has shared them out.
        ({'CUDA_VISIBLE_DEVICES': '3'}, (3, 4), [0]),
        (
            {'CUDA_VISIBLE_DEVICES': '0,1', 'SLURM_GPUS_PER_TASK': '2'},
            (1, 2),
            [0, 1],
        ),
        # JAX decides.
        ({}, (1, 2), None),
        (
            {'CUDA_VISIBLE_DEVICES': '0', 'JAX_LOCAL_DEVICE_IDS': '0'},
            (1, 2),
            None,
        ),
    ],
)
def test_a_task_takes_its_share_of_the_gpus_it_sees(variables, local, ids):
  rank, count = local
  variables = variables | {
      'SLURM_LOCALID': str(rank),
      'SLURM_NODEID': '1',
      'SLURM_STEP_TASKS_PER_NODE': f'7,{count}(x3)',
  }
  assert launchers.local_devices(variables) == ids
