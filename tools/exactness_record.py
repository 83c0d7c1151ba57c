"""Writes the record in docs/numerics.md: what was compared to the bit on GPUs.

A row per variant of each result of benchmarks/exactness.py and grpo_step.py,
also where something was unequal. After a new result:

    python -m tools.exactness_record
"""

import json
import pathlib
import re
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
OUTPUT = ROOT / 'docs' / 'numerics.md'
_RESULTS = ROOT / 'benchmarks' / 'results'
_OPEN = '<!-- exactness-record: written by tools/exactness_record.py -->\n'
_CLOSE = '<!-- /exactness-record -->\n'
_HEAD = """\
## The record on GPUs

Every comparison to the bit of rollout and training that was recorded on a GPU,
newest first. All used the shapes of real models, random weights, real prompts
and jax 0.11.2.

`+kv8` is an FP8 KV cache, `+head8` an FP8 head, `+selective` is
`model.remat='selective'`. Commits 0c6678e, ad09459 and 635249e entered the
history inside two larger ones, 60fa72f and df087be.
"""
_STEPS = """
### Whole steps

Rollout, log-probs and several updates, then the same again with the new
weights. Each response token's log-prob from the rollout is compared with the
one that the update computes. "Preempted" counts how often a sequence gave up
its KV pages and was computed again.

"""
_CHECKS = """
### Slots, packings, preempted sequences

One rollout in some number of slots is compared with the same responses in other
numbers of slots, and in a KV pool so small that sequences are preempted
("parked" in the raw files). It is also compared with the training forward
(`logprobs`) and the update (`accumulate`), packed in several ways: `4x3` is 4
rows, each 3 times as long as the longest sequence. "Times" is the number of
these comparisons.

"""
_TAIL = """
### Without rows of their own

* The quickstart in `fp8_delayed`, `fp8_block` and `int8`, the quickstart with
  dynamic sampling, and both multi-turn examples had no unequal token in whole
  runs on an H200 ([flows]({results}/flows_quickstart_h200_2026-11-22.md)).
  `fp8_block` was a loop over groups at that time; as one kernel, as it is now,
  it had none either ([30
  steps]({results}/block_quickstart_h200_2026-11-22.md)).
* The quickstart over two GPUs, eight steps with `mesh.fsdp=2` and eight with
  `mesh.data=2`, had none
  ([steps]({results}/mesh_quickstart_h200_2026-11-22.md)).
* A whole 7B on four H200, three steps each with `mesh.data=4`, `mesh.fsdp=4`
  and `mesh.data=2 mesh.tensor=2`, had none in first mini-batches, and one
  GPU's log-probs
  ([steps]({results}/scaling_4gpus_qwen7b_h200_2026-11-26.md)); a 32B with
  `mesh.fsdp=4` had none in two
  ([steps]({results}/scaling_4gpus_qwen32b_h200_2026-11-26.md)).
* FP8 keys in attention tiles of 16 had unequal tokens on an H100
  ([trials]({results}/smollm2_135m_sums_h100_2026-11-25.md)). No kernel takes
  such tiles now.
* An early version of the `bf16` path differed at the 7B's width with more than
  4096 rows. The reason was not found.
"""
_LINKED = '../benchmarks/results'
_UNEQUAL = 'share of tokens unequal'
_MODELS = {
    'qwen0_5b': 'Qwen2.5-0.5B',
    'qwen1_5b': 'Qwen2.5-1.5B',
    'qwen3b': 'Qwen2.5-3B',
    'qwen7b': '7B',
    'qwen14b': '14B',
    'qwen3_8b': 'Qwen3-8B',
    'llama8b': 'Llama-3.1-8B',
}


def _results(theme: str) -> list[tuple[pathlib.Path, dict[str, Any]]]:
  """Returns (file, content) of a theme's results, newest first."""
  files = _RESULTS.glob(f'{theme}*_h[12]00_*.json')
  read = [(path, json.loads(path.read_text('utf-8'))) for path in files]
  return sorted(
      read, key=lambda pair: (pair[1]['date'], pair[0].name), reverse=True
  )


def _by_variant(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
  found: dict[str, list[dict[str, Any]]] = {}
  for row in result['rows']:
    found.setdefault(row.get('variant', 'fp8_delayed'), []).append(row)
  return found


def _line(*cells: str) -> str:
  return f'| {" | ".join(cells)} |\n'


def _table(*columns: str) -> str:
  columns = 'device', 'model, variant', *columns, _UNEQUAL, 'at'
  return _line(*columns) + _line(*['---'] * len(columns)).replace(' ', '')


def _row(path: pathlib.Path, result, variant: str, *cells: str) -> str:
  model = next(name for key, name in _MODELS.items() if key in path.name)
  device = 'H100' if 'H100' in result['hardware'] else 'H200'
  mesh = re.findall(r'--config\.(mesh\.\w+=(\d+))', result['command'])
  for _, size in mesh:
    device = f'{size} x {device}'
  where = ', '.join([model, *(f'`{x}`' for x in [variant, *dict(mesh)])])
  link = f'[{result["commit"]}]({_LINKED}/{path.stem}.md)'
  return _line(device, where, *cells, link)


def _steps() -> str:
  lines = [_table('steps', 'longest response', 'preempted')]
  for path, result in _results('grpo_step'):
    for variant, rows in _by_variant(result).items():
      rows = [row for row in rows if 'training/mismatch_token_frac' in row]
      cells = (
          str(len(rows)),
          f'{max(row["response_length/max"] for row in rows):.0f}',
          f'{sum(row.get("rollout/num_preempted", 0) for row in rows):.0f}',
          f'{max(row["training/mismatch_token_frac"] for row in rows):.3g}',
      )
      lines.append(_row(path, result, variant, *cells))
  return ''.join(lines)


def _checks() -> str:
  lines = [_table('compared with', 'tokens', 'times')]
  for path, result in _results('exactness'):
    for variant, rows in _by_variant(result).items():
      parked = sum(row.get('parked') or 0 for row in rows)
      names = ', '.join(row['check'] for row in rows)
      cells = (
          names.replace('few pages', f'few pages ({parked} preempted)'),
          str(max(row['tokens'] for row in rows)),
          str(len(rows)),
          f'{max(row["unequal"] for row in rows):.3g}',
      )
      lines.append(_row(path, result, variant, *cells))
  return ''.join(lines)


def render(page: str) -> str:
  """Returns the page with the record as the results have it."""
  before, _, rest = page.partition(_OPEN)
  _, closed, after = rest.partition(_CLOSE)
  assert closed, f'{OUTPUT} must have {_OPEN} and {_CLOSE}'
  tail = _TAIL.format(results=_LINKED)
  record = _HEAD + _STEPS + _steps() + _CHECKS + _checks() + tail
  return before + _OPEN + record + _CLOSE + after


if __name__ == '__main__':
  OUTPUT.write_text(render(OUTPUT.read_text('utf-8')), encoding='utf-8')
