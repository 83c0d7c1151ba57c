"""Times vLLM at the workloads of `benchmarks.rollout`.

    python -m benchmarks.rollout_in_vllm --quantization=fp8 --kv=fp8 \
        --workloads=128x128x1x2048,128x32x8x1024 --output=OUT.json

Dummy weights, offline, continuous batching with CUDA graphs, prefix caching on:
vLLM's defaults but for the memory and the number of sequences. A step is one of
the longest answer's, as in `benchmarks.rollout`; both include the prefill.
Run it on one GPU while `benchmarks.rollout` runs on another of the same host,
because hosts differ. This process has JAX's threads, so an engine in a process
of its own wants VLLM_WORKER_MULTIPROCESSING_METHOD=spawn.
"""

import json
import pathlib
import random
import tempfile
import time

from absl import app, flags

from jetrl_jax.config.model import SHAPES
from jetrl_jax.models.hf.config import config_to_hf

_SHAPE = flags.DEFINE_string('shape', 'qwen2.5-7b', 'See model.shape.')
_QUANTIZATION = flags.DEFINE_enum('quantization', 'bf16', ['bf16', 'fp8'], '')
_KV = flags.DEFINE_enum('kv', 'auto', ['auto', 'fp8'], 'kv_cache_dtype.')
_WORKLOADS = flags.DEFINE_list(
    'workloads', ['128x128x1x2048'], 'PROMPT_LENGTH x PROMPTS x SAMPLES x NEW.'
)
_LOGPROBS = flags.DEFINE_bool(
    'logprobs', True, "Ask for the sampled tokens' log-probs, as RL does."
)
_OUTPUT = flags.DEFINE_string('output', None, 'JSON.')


def main(_):
  """Times the workloads, after a short one that warms up."""
  import vllm

  folder = pathlib.Path(tempfile.mkdtemp())
  ids = dict.fromkeys(('bos_token_id', 'eos_token_id'), 0)
  config = config_to_hf(SHAPES[_SHAPE.value]) | ids
  config['torch_dtype'] = 'bfloat16'
  (folder / 'config.json').write_text(json.dumps(config))
  options = {'quantization': 'fp8'} if _QUANTIZATION.value == 'fp8' else {}
  engine = vllm.LLM(
      model=str(folder),
      load_format='dummy',
      skip_tokenizer_init=True,
      dtype='bfloat16',
      max_model_len=4096,
      max_num_seqs=512,
      gpu_memory_utilization=0.85,
      kv_cache_dtype=_KV.value,
      enable_prefix_caching=True,
      **options,
  )
  numbers = random.Random(0)

  def seconds(workload: str) -> tuple[float, int]:
    length, prompts, samples, new = map(int, workload.split('x'))
    asked = [
        {'prompt_token_ids': [numbers.randrange(32000) for _ in range(length)]}
        for _ in range(prompts)
    ]
    sampling = vllm.SamplingParams(
        n=samples,
        temperature=1.0,
        max_tokens=new,
        ignore_eos=True,
        detokenize=False,
        logprobs=0 if _LOGPROBS.value else None,
    )
    started = time.monotonic()
    engine.generate(asked, sampling, use_tqdm=False)
    return time.monotonic() - started, new

  seconds('128x8x1x32')
  rows = []
  for workload in _WORKLOADS.value:
    took, steps = seconds(workload)
    rows.append(
        {
            'vllm': vllm.__version__,
            'shape': _SHAPE.value,
            'weights': _QUANTIZATION.value,
            'kv': _KV.value,
            'logprobs': _LOGPROBS.value,
            'workload': workload,
            'ms_per_step': round(took / steps * 1e3, 3),
        }
    )
    print(json.dumps(rows[-1]), flush=True)
    pathlib.Path(_OUTPUT.value).write_text(json.dumps(rows))


if __name__ == '__main__':
  flags.mark_flag_as_required('output')
  app.run(main)
