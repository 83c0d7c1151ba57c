"""How a launcher (Slurm, Open MPI, Kubernetes) tells a process who it is.

JAX finds the rest itself (`processes.start`). Here is what has to be known
before it: how many processes there are, and which GPUs are whose.
"""

import importlib.util
import os
from collections.abc import Mapping

# Environment variables that are read where no launcher says it.
ADDRESS = 'JAX_COORDINATOR_ADDRESS'
COUNT = 'JAX_NUM_PROCESSES'
RANK = 'JAX_PROCESS_ID'


def launched() -> int:
  """Returns how many processes the launcher has started, by its variables.

  0 is an indexed Job of Kubernetes, which only its API knows the size of.

  Raises:
    ValueError: the variables of `ADDRESS`, `COUNT` and `RANK` are incomplete.
  """
  env = os.environ
  by_hand = {name: env.get(name, '') for name in (ADDRESS, COUNT, RANK)}
  if by_hand[COUNT] == '1':
    return 1
  if by_hand[COUNT] or by_hand[RANK]:
    if missing := [name for name, value in by_hand.items() if not value]:
      raise ValueError(
          f'{", ".join(missing)} is not set, but'
          f' {", ".join(n for n, v in by_hand.items() if v)} is; several'
          f' processes need all three: {ADDRESS}=host:port of process 0,'
          f' {COUNT} and {RANK} (from 0)'
      )
    for name in (COUNT, RANK):
      if not by_hand[name].isdecimal():
        raise ValueError(
            f'{name} is {by_hand[name]!r}; allowed: integers from 0'
        )
    if int(by_hand[RANK]) >= int(by_hand[COUNT]):
      raise ValueError(
          f'{RANK} is {by_hand[RANK]}; allowed with {COUNT}={by_hand[COUNT]}:'
          f' 0 to {int(by_hand[COUNT]) - 1}'
      )
    return int(by_hand[COUNT])
  # `srun` sets the list of a step's nodes; a batch script does not have it.
  if env.get('SLURM_STEP_NODELIST') and env.get('SLURM_PROCID'):
    return int(env.get('SLURM_NTASKS', '1'))
  if env.get('OMPI_MCA_orte_hnp_uri'):
    return int(env.get('OMPI_COMM_WORLD_SIZE', '1'))
  if (
      env.get('KUBERNETES_SERVICE_HOST')
      and env.get('JOB_COMPLETION_INDEX')
      and importlib.util.find_spec('kubernetes')
  ):
    return 0
  if by_hand[ADDRESS]:
    raise ValueError(
        f'{ADDRESS} is set, but neither {COUNT} and {RANK} nor the variables of'
        ' Slurm or Open MPI are; set them, or unset it for one process'
    )
  return 1


def check_alone() -> None:
  """Checks a command that is one process.

  Raises:
    ValueError: the launcher has started several; see also `launched`.
  """
  if (started := launched()) > 1:
    raise ValueError(
        f'this command is one process, but the launcher started {started};'
        f' start it without srun or mpirun, and without {COUNT}'
    )


def local_devices(env: Mapping[str, str]) -> list[int] | None:
  """Returns which of the visible GPUs a task of Slurm or Open MPI takes.

  JAX would take one, of the task's number on its host. That is wrong where the
  launcher shows each task its own GPUs only, and where a task has several.

  Args:
    env: the environment.

  Returns:
    Positions in CUDA_VISIBLE_DEVICES; None to leave it to JAX.
  """
  rank = env.get('SLURM_LOCALID', env.get('OMPI_COMM_WORLD_LOCAL_RANK'))
  visible = [id for id in env.get('CUDA_VISIBLE_DEVICES', '').split(',') if id]
  if rank is None or not visible or env.get('JAX_LOCAL_DEVICE_IDS'):
    return None
  tasks = _tasks_here(env)
  shown = 'SLURM_GPUS_PER_TASK' in env or 'SLURM_TRES_PER_TASK' in env
  if shown or len(visible) < tasks or len(visible) % tasks:
    return list(range(len(visible)))
  each = len(visible) // tasks
  return list(range(int(rank) * each, (int(rank) + 1) * each))


def _tasks_here(env: Mapping[str, str]) -> int:
  """Returns the number of tasks on this host, of '2(x3),1' for example."""
  if (size := env.get('OMPI_COMM_WORLD_LOCAL_SIZE')) is not None:
    return int(size)
  nodes: list[int] = []
  for part in env.get('SLURM_STEP_TASKS_PER_NODE', '1').split(','):
    tasks, _, times = part.partition('(x')
    nodes += [int(tasks)] * int(times.rstrip(')') or 1)
  return nodes[int(env.get('SLURM_NODEID', '0'))]
