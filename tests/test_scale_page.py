"""The files that docs/scale.md shows for Slurm and Kubernetes."""

import os
import pathlib
import re
import stat
import subprocess
import sys

import pytest
import yaml

from tests import whole_run

_PAGE = (whole_run.ROOT / 'docs' / 'scale.md').read_text(encoding='utf-8')
_FLAG = re.compile(r'--config\.mesh\.\w+=(\d+)')


def _shown(language: str) -> str:
  (found,) = re.findall(rf'```{language}\n(.*?)```', _PAGE, re.DOTALL)
  return found


def _devices(words: list[str]) -> int:
  """The number of devices of the mesh of a command."""
  product = 1
  for size in _FLAG.findall(' '.join(words)):
    product *= int(size)
  return product


def test_the_jobset_starts_as_many_processes_as_its_mesh_has_devices():
  jobset = yaml.safe_load(_shown('yaml'))
  assert jobset['apiVersion'] == 'jobset.x-k8s.io/v1alpha2'
  assert jobset['kind'] == 'JobSet'
  name, spec = jobset['metadata']['name'], jobset['spec']
  assert set(spec) == {'failurePolicy', 'replicatedJobs'}
  assert spec['failurePolicy']['maxRestarts'] > 0
  (hosts,) = spec['replicatedJobs']
  assert set(hosts) == {'name', 'replicas', 'template'}
  assert hosts['replicas'] == 1
  job = hosts['template']['spec']
  # What a Job needs for JAX_PROCESS_ID, and to fail at once.
  assert job['completionMode'] == 'Indexed'
  assert job['parallelism'] == job['completions']
  assert job['backoffLimit'] == 0
  pod = job['template']['spec']
  assert pod['restartPolicy'] == 'Never'
  (container,) = pod['containers']
  env = {one['name']: one for one in container['env']}
  assert env['JAX_NUM_PROCESSES']['value'] == str(job['completions'])
  # JobSet names a pod NAME-JOB-0-INDEX, and the service of all by NAME.
  address, port = env['JAX_COORDINATOR_ADDRESS']['value'].split(':')
  assert address == f'{name}-{hosts["name"]}-0-0.{name}'
  assert 1024 <= int(port) < 65536
  index = env['JAX_PROCESS_ID']['valueFrom']['fieldRef']['fieldPath']
  assert 'batch.kubernetes.io/job-completion-index' in index
  gpus = container['resources']['limits']['nvidia.com/gpu']
  assert _devices(container['command']) == gpus * job['completions']
  mounts = {mount['name'] for mount in container['volumeMounts']}
  assert mounts == {volume['name'] for volume in pod['volumes']}
  (where,) = [mount['mountPath'] for mount in container['volumeMounts']]
  (workdir,) = [x for x in container['command'] if x.startswith('--workdir=')]
  assert workdir.startswith(f'--workdir={where}/')


def test_the_slurm_script_asks_for_as_many_gpus_as_its_mesh_has_devices():
  script = _shown('bash')
  asked = dict(re.findall(r'^#SBATCH --([\w-]+)=(\S+)$', script, re.MULTILINE))
  tasks = int(asked['nodes']) * int(asked['ntasks-per-node'])
  assert asked['gpus-per-node'] == asked['ntasks-per-node']
  assert _devices([script]) == tasks


# Starts two tasks with Slurm's variables; in the first attempt one is killed.
_SRUN = """#!{python}
import os, pathlib, signal, subprocess, sys, time
from tests import launched
command = sys.argv[1 + sys.argv[1:].index('python'):]
assert sys.argv[1] == '--kill-on-bad-exit=1', sys.argv
assert command[:3] == ['python', '-m', 'jetrl_jax.main'], command
# The page's config and mesh are for 16 GPUs.
command = [sys.executable, *command[1:3], *{flags!r}]
calls = pathlib.Path({calls!r})
first = not calls.exists()
with open(calls, 'a') as file:
  file.write('called\\n')
port = launched.free_port()
tasks = [
    subprocess.Popen(
        command, cwd={home!r}, env=os.environ | launched.srun(rank, 2, port)
    )
    for rank in range(2)
]
lines = pathlib.Path({lines!r})
while all(task.poll() is None for task in tasks):
  if first and lines.exists() and len(lines.read_text().splitlines()) > 1:
    tasks[1].kill()
    break
  time.sleep(0.05)
failed = None
while any(task.poll() is None for task in tasks):
  if any(task.poll() for task in tasks):
    failed = failed or time.monotonic()
    for task in tasks:  # Slurm waits KillWait seconds before it kills.
      task.terminate() if time.monotonic() < failed + 3 else task.kill()
  time.sleep(0.05)
sys.exit(max(abs(task.returncode) for task in tasks))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_slurm_script_starts_again_after_a_task_has_died(tmp_path):
  workdir, calls = tmp_path / 'run', tmp_path / 'calls'
  changes = {
      'mesh.data': 2,
      'trainer.total_training_steps': 3,
      'trainer.save_freq': 1,
      'trainer.test_freq': 0,
  }
  srun = tmp_path / 'bin' / 'srun'
  srun.parent.mkdir()
  srun.write_text(
      _SRUN.format(
          python=sys.executable,
          flags=[
              f'--config={whole_run.ROOT}/tests/tiny_config.py',
              f'--workdir={workdir}',
              *(f'--config.{k}={v}' for k, v in changes.items()),
          ],
          calls=str(calls),
          home=str(whole_run.home()),
          lines=str(workdir / 'metrics.jsonl'),
      )
  )
  srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
  activate = tmp_path / '.venv' / 'bin' / 'activate'
  activate.parent.mkdir(parents=True)
  activate.write_text('')
  script = tmp_path / 'grpo.sh'
  script.write_text(_shown('bash'))
  done = subprocess.run(
      ['bash', script],
      cwd=tmp_path,
      env=os.environ
      | {
          'PATH': os.pathsep.join([str(srun.parent), os.environ['PATH']]),
          'PYTHONPATH': str(whole_run.ROOT),
          'JAX_PLATFORMS': 'cpu',
          'XLA_FLAGS': '--xla_force_host_platform_device_count=1',
          # Compiling is what this costs, and no bit is compared.
          'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
      },
      capture_output=True,
      text=True,
      check=False,
  )
  # Twice; on a slow machine gloo may give up a task that still compiles.
  attempts = len(calls.read_text().splitlines())
  assert 2 <= attempts <= 5 and not done.returncode, done.stdout + done.stderr
  steps = [record['step'] for record in whole_run.records(workdir)]
  assert steps == [*range(4)]
  starts = (workdir / 'starts.jsonl').read_text().splitlines()
  assert (
      2 <= len(starts) <= attempts and pathlib.Path(workdir, 'export').exists()
  )
