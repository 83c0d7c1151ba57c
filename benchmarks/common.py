"""What the benchmarks share: random models, timing, profiles, records."""

import collections
import dataclasses
import datetime
import gzip
import json
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags

from configs import base
from jetrl_jax.config import model as config_model
from jetrl_jax.core import device_memory
from jetrl_jax.data import Prompt
from jetrl_jax.metrics import provenance
from jetrl_jax.models.policy import Policy
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl import packing
from jetrl_jax.rl.run import train_state

# --help shows what is defined here with a script's own flags, see `run`.
flags.disclaim_key_flags()

OUTPUT = flags.DEFINE_string('output', None, 'Result path without ending.')
COMMIT = flags.DEFINE_string(
    'commit', '', 'Commit under test, where git is not at hand.'
)
TINY = flags.DEFINE_bool(
    'tiny', False, 'Small shapes: to try a script on a CPU.'
)
BYTES_PER_S = 4.3e12  # attainable on an H200
_LONGEST = 15  # kernels that a record names


def run(main: Callable[[list[str]], None]) -> None:
  """Runs a script that ends with `write`."""
  for name in ('output', 'commit', 'tiny'):
    flags.declare_key_flag(name)
  flags.mark_flag_as_required('output')
  device_memory.take_most()
  app.run(main)


def environment() -> dict:
  """Returns date, commit, versions, hardware and command."""
  device = jax.devices()[0]
  started = sys.modules['__main__'].__spec__
  program = ['-m', started.name] if started else [sys.argv[0]]
  return {
      'date': datetime.date.today().isoformat(),
      'commit': COMMIT.value or provenance.commit() or 'unknown',
      'hardware': f'{jax.device_count()} x {device.device_kind}',
      'versions': provenance.versions(),
      'command': ' '.join(['python', *program, *sys.argv[1:]]),
  }


def table(rows: Iterable[dict], columns: Sequence[tuple[str, str, str]]) -> str:
  """Returns a Markdown table.

  Args:
    rows: records.
    columns: (key, label, format); columns that no row has are left out.
  """
  rows = list(rows)
  shown = [c for c in columns if any(c[0] in row for row in rows)]
  lines = [
      '| ' + ' | '.join(label for _, label, _ in shown) + ' |',
      '|' + '---|' * len(shown),
  ]
  for row in rows:
    cells = [
        format(row[name], form) if name in row else ''
        for name, _, form in shown
    ]
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def write(
    rows: list[dict], summary: dict, shown: str, hardware: str = ''
) -> None:
  """Writes OUTPUT.json and OUTPUT.md and prints the table.

  Args:
    rows: all that was measured.
    summary: the ratios.
    shown: Markdown.
    hardware: where other processes measured; by default this process's.
  """
  path = pathlib.Path(OUTPUT.value)
  record = environment() | {
      'name': path.name,
      'rows': rows,
      'summary': summary,
  }
  record['hardware'] = hardware or record['hardware']
  path.parent.mkdir(parents=True, exist_ok=True)
  path.with_name(path.name + '.json').write_text(json.dumps(record, indent=1))
  head = '\n'.join(
      f'* {key}: {record[key]}'
      for key in ('date', 'hardware', 'commit', 'versions', 'command')
  )
  lines = '\n'.join(f'* {key}: {value}' for key, value in summary.items())
  path.with_name(path.name + '.md').write_text(
      f'# {path.name}\n\n{head}\n\n{shown}\n\n{lines}\n'.rstrip() + '\n'
  )
  print(shown, lines, sep='\n\n', flush=True)


def overrides(variant: str) -> dict:
  """Returns the config of 'RECIPE', or 'RECIPE+OPTION', or with more options.

  Args:
    variant: options are 'kv8' (FP8 keys and values), 'smooth' (the same with
      `precision.smooth_k`), 'head8' (see `precision.quantize_lm_head`),
      'selective' (see `model.remat`), 'inexact' (see `precision.exact`),
      'reference' (see `kernels`), and 'gather' (see `kernels/gather_columns`).
  """
  options = {
      'kv8': {'precision.kv_cache_dtype': 'float8_e4m3fn'},
      'smooth': {
          'precision.kv_cache_dtype': 'float8_e4m3fn',
          'precision.smooth_k': True,
      },
      'head8': {'precision.quantize_lm_head': True},
      'selective': {'model.remat': 'selective'},
      'inexact': {'precision.exact': False},
      'reference': {'kernels': 'reference'},
      'gather': {'kernels': 'gather_columns=mosaic_sm90'},
  }
  recipe, *chosen = variant.split('+')
  settings = {'precision.recipe': recipe, 'precision.kv_cache_dtype': 'compute'}
  for option in chosen:
    settings |= options[option]
  return settings


def projections(model) -> dict[str, tuple[int, int]]:
  """Returns name -> (in, out) of a model's dots, by its `ModelConfig`."""
  d, f, h = model.model_dim, model.ffn_dim, model.head_dim
  return {
      'qkv': (d, (model.num_heads + 2 * model.num_kv_heads) * h),
      'o': (model.num_heads * h, d),
      'gate_up': (d, 2 * f),
      'down': (f, d),
      'lm_head': (d, model.vocab_size),
  }


def random_policy(
    shape: str, overrides: dict | None = None, layers: int = 0
) -> tuple[Policy, jax.sharding.Mesh, Callable]:
  """Returns (policy, mesh, function that makes random masters).

  Args:
    shape: see `model.shape`.
    overrides: dotted config keys to values, on top of `configs/base.py`.
    layers: of the model's; 0 for all.
  """
  config = base.get_config()
  config.model.init = 'random'
  config.model.shape = shape
  config.model.master_dtype = 'bfloat16'
  config.update_from_flattened_dict(overrides or {})
  if config.model.init != 'random':
    config.model.shape = ''
  policy, mesh, folder = config_model.build_policy(config)
  if TINY.value:
    model = dataclasses.replace(
        policy.model,
        vocab_size=512,
        num_layers=2,
        model_dim=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        ffn_dim=256,
    )
    policy = dataclasses.replace(policy, model=model)
  if layers:
    model = dataclasses.replace(policy.model, num_layers=layers)
    policy = dataclasses.replace(policy, model=model)
  make, _ = config_model.parameters(config, policy, mesh, folder)
  return policy, mesh, make


def random_state(
    policy: Policy,
    mesh: jax.sharding.Mesh,
    params,
    optimizer: OptimizerConfig | None = None,
) -> TrainState:
  """Returns a state over `params`, its activation scales uncalibrated."""
  optimizer = optimizer or OptimizerConfig(lr=1e-5, moments='fp8')
  return train_state.create(policy, params, optimizer.build(), mesh)


def random_prompts(count: int, length: int, vocab: int) -> list[Prompt]:
  """Returns prompts of random tokens."""
  random = np.random.default_rng(0)
  tokens = random.integers(0, vocab, (count, length), dtype=np.int32)
  return [
      Prompt(
          id=i, tokens=tokens[i], text='', answer='', source='random', extra={}
      )
      for i in range(count)
  ]


def shortened(prompt: Prompt, length: int) -> Prompt:
  """Returns the prompt's first tokens."""
  return dataclasses.replace(prompt, tokens=prompt.tokens[:length])


def joined(texts: Sequence[np.ndarray], size: int) -> list[np.ndarray]:
  """Returns texts as sequences of `size` tokens; a shorter rest is left out.

  Args:
    texts: tokens, int [T] each: the benchmark's --problems.
    size: its --length.

  Raises:
    ValueError: all texts together are shorter.
  """
  line = np.concatenate(texts)
  if size > len(line):
    raise ValueError(
        f'--length is {size}, but {len(texts)} problems have {len(line)} tokens'
        ' together; set a smaller one, or more --problems'
    )
  return [line[i : i + size] for i in range(0, len(line) - size + 1, size)]


def sequences_of(completions: Iterable) -> list[packing.Sequence]:
  """Returns what training learns from completions: advantage 1, one weight."""
  return [
      packing.sequence_from_completion(
          completion,
          advantage=1.0,
          loss_weight=1e-4,
          mask_truncated=False,
          origin=i,
      )
      for i, completion in enumerate(completions)
  ]


def seconds(run: Callable[[], object]) -> float:
  """Returns the wall time of one call, the device's work included."""
  start = time.perf_counter()
  jax.block_until_ready(run())
  return time.perf_counter() - start


def median_seconds(run: Callable[[], object], repeats: int = 5) -> float:
  """Returns the median wall time of `repeats` calls after one to warm up."""
  seconds(run)
  return float(np.median([seconds(run) for _ in range(repeats)]))


def peak_gib() -> float | None:
  """Returns the device's peak memory in GiB, None where it does not tell."""
  stats = jax.devices()[0].memory_stats()
  return stats['peak_bytes_in_use'] / 2**30 if stats else None


def count_kernels(compiled) -> int:
  """Returns how many kernels and copies a compiled program starts.

  Counted in XLA's own text. Loops count once, so it is a lower bound where
  there are any.

  Args:
    compiled: of `jax.jit(...).lower(...).compile()`.
  """
  text = compiled.as_text()
  entry = text[text.index('ENTRY') :]
  kinds = 'fusion|copy|custom-call|reduce|convolution|dot|call|while'
  return len(re.findall(rf' = [^=]*? (?:{kinds})\(', entry))


def device_events(folder: str) -> list[dict]:
  """Returns the kernels that a profile in `folder` saw on the device."""
  (path,) = pathlib.Path(folder).rglob('*.trace.json.gz')
  with gzip.open(path) as file:
    events = json.load(file)['traceEvents']
  lanes = {
      (e['pid'], e['tid'])
      for e in events
      if e.get('name') == 'thread_name' and 'Stream' in e['args']['name']
  }
  return [
      e for e in events if e.get('ph') == 'X' and (e['pid'], e['tid']) in lanes
  ]


def kernel_times(run: Callable[[], object]) -> dict[str, tuple[float, int]]:
  """Returns kernel name -> (milliseconds, launches) of one call.

  Args:
    run: compiled and warm; what is in a CUDA graph is seen as one.
  """
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      jax.block_until_ready(run())
    events = device_events(folder)
  times = collections.defaultdict(lambda: (0.0, 0))
  for event in events:
    name = re.sub(r'[._]\d+$', '', event['name'])
    total, count = times[name]
    times[name] = total + event['dur'] / 1e3, count + 1
  return dict(times)


def gpu_seconds(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
  """Returns a profile's seconds of kernels on each GPU of this process.

  'collectives' are NCCL's and XLA's own; they include the wait for others.
  'longest' are (kernel, seconds, count), those of most seconds first.
  """
  found: dict[str, dict[str, Any]] = {}
  for path in folder.rglob('*.xplane.pb'):
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
      if not plane.name.startswith('/device:GPU'):
        continue
      seconds = found.setdefault(plane.name, {'all': 0.0, 'collectives': 0.0})
      kernels: dict[str, tuple[float, int]] = {}
      for line in plane.lines:
        for event in line.events if 'Stream' in (line.name or '') else ():
          spent = event.duration_ns / 1e9
          seconds['all'] += spent
          name = event.name or ''
          if 'nccl' in name.lower() or 'allreducekernel' in name.lower():
            seconds['collectives'] += spent
          before = kernels.get(name[:60], (0.0, 0))
          kernels[name[:60]] = before[0] + spent, before[1] + 1
      longest = sorted(kernels.items(), key=lambda kernel: -kernel[1][0])
      seconds['longest'] = [
          (name, round(spent, 4), count)
          for name, (spent, count) in longest[:_LONGEST]
      ]
  return found


def show_kernels(times: dict[str, tuple[float, int]], top: int = 40) -> str:
  """Returns the longest kernels, a line each: ms, launches, name."""
  ordered = sorted(times.items(), key=lambda item: -item[1][0])
  whole = sum(ms for ms, _ in times.values())
  lines = [f'{whole:10.3f} ms in {sum(n for _, n in times.values())} kernels']
  lines += [
      f'{ms:10.3f} {n:6d}  {name[:90]}' for name, (ms, n) in ordered[:top]
  ]
  return '\n'.join(lines)
