"""Reward functions as users of verl and TRL write them."""

import os
import subprocess
import sys
import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
  return {
      'score': float(ground_truth in solution_str),
      'acc': float(solution_str.endswith(ground_truth)),
      'pred': solution_str.split()[-1],
      'source': f'{data_source} {extra_info}',
  }


def predicts(data_source, solution_str, ground_truth, extra_info=None):
  predictions = {'zero': 0, 'half': '\ud83d'}
  return {'score': 1.0, 'acc': 1.0, 'pred': predictions.get(solution_str)}


def countdown(data_source, solution_str, ground_truth, extra_info=None):
  first, second = map(int, solution_str.replace('+', '*').split('*'))
  assert {first, second} <= {*ground_truth['numbers']}
  value = first * second if '*' in solution_str else first + second
  return float(value == ground_truth['target'])


def trl_ids(completion_ids, **kwargs):
  """As TRL's length rewards: token ids alone."""
  (ids,) = completion_ids
  assert isinstance(ids, list)
  return [sum(ids) + len(ids) / 100]


def trl_state(completions, trainer_state):
  return [trainer_state.global_step]


def trl_solution(completions, solution):
  return [1.0]


def needs_model(data_source, solution_str, ground_truth, reward_model):
  return 1.0


def trl_target(completions, answer, **kwargs):
  return [answer[0]['target']]


def with_kwargs(
    data_source, solution_str, ground_truth, extra_info=None, penalty=0.0
):
  return len(solution_str) * penalty


def sees_extra_info(data_source, solution_str, ground_truth, extra_info=None):
  assert extra_info is not None
  return extra_info['index']


def has_bold_text(completions, **kwargs):
  """TRL's quick start, on conversations."""
  return [1.0 if '**' in c[0]['content'] else 0.0 for c in completions]


def trl_columns(prompts, completions, answer, **kwargs):
  assert len(prompts) == len(completions) == len(answer) == 1
  assert kwargs['level'] == [3]
  return [float(len(prompts[0]))]


def trl_not_applicable(prompts, completions, **kwargs):
  return [None] * len(completions)


def trl_for_numbers(completions, **kwargs):
  return [1.0 if c.isdigit() else None for c in completions]


async def trl_async(prompts, completions, **kwargs):
  return [0.25 for _ in completions]


def raises(data_source, solution_str, ground_truth, extra_info=None):
  return {}['no such key']


def exits(data_source, solution_str, ground_truth, extra_info=None):
  sys.exit(3)


def forks(data_source, solution_str, ground_truth, extra_info=None):
  """Returns from both processes, or ends the child as one should not."""
  child = os.fork()
  if solution_str == 'child first' and child:
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
  if solution_str == 'parent first' and not child:
    time.sleep(0.3)
  if solution_str == 'exits' and not child:
    sys.exit(3)
  return 1.0


def prints(data_source, solution_str, ground_truth, extra_info=None):
  for _ in range(200):
    print(solution_str[:1] * 10_000)
  os.write(1, b'.')
  sys.stdout.buffer.write(b'y' * 10**7)
  return 1.0


def chained(data_source, solution_str, ground_truth, extra_info=None):
  try:
    return int('seven')
  except ValueError as error:
    raise KeyError('x' * 10**6) from error


def not_finite(data_source, solution_str, ground_truth, extra_info=None):
  return float('nan')


def infinite(data_source, solution_str, ground_truth, extra_info=None):
  return {'score': 1.0, 'acc': float('inf')}


def accurate(data_source, solution_str, ground_truth, extra_info=None):
  return {'score': 1.0, 'acc': 7}


def text(data_source, solution_str, ground_truth, extra_info=None):
  return '1.0'


def large(data_source, solution_str, ground_truth, extra_info=None):
  return 1e300


def predicts_all(data_source, solution_str, ground_truth, extra_info=None):
  return {'score': 1.0, 'pred': solution_str * 100_000}


def huge(data_source, solution_str, ground_truth, extra_info=None):
  return 10**400


def unwritable(data_source, solution_str, ground_truth, extra_info=None):
  return 10**5000


def words(data_source, solution_str, ground_truth, extra_info=None):
  return 'very good'


_KEPT = []


def keeps(data_source, solution_str, ground_truth, extra_info=None):
  """Never lets go of what an answer took: as many bytes as it says."""
  _KEPT.append(bytes(int(solution_str)))  # Of pages that nobody touches.
  return 1.0


def obeys(data_source, solution_str, ground_truth, extra_info=None):
  """Does what the answer says."""
  match solution_str:
    case 'hang':
      time.sleep(3600)
    case 'late':
      time.sleep(0.6)  # Longer than pools.LIMIT.
    case 'crash':
      os.abort()
    case 'child' | 'orphan':
      # Ignores all that can be ignored, and outlives its parent.
      # An answer that crashed is tried again, and killed at any moment.
      number = 'echo $$ > "$0.new"; mv "$0.new" "$0"'
      script = f'trap "" TERM HUP INT; {number}; exec sleep 3600'
      where = data_source
      subprocess.Popen(['sh', '-c', script, where], start_new_session=False)
      while not os.path.exists(where) or not open(where).read().strip():
        time.sleep(0.01)
      if solution_str == 'orphan':
        os.abort()
      time.sleep(3600)
    case 'memory':
      return float(len(bytearray(10**10)))
    case 'jax':
      return float('jax' in sys.modules)
    case 'pid':
      return float(os.getpid())
  return 1.0


def other(a, b):
  return 0.0


def forgets(data_source, solution_str, ground_truth, extra_info=None):
  """Returns a score for right answers alone."""
  if solution_str == ground_truth:
    return 1.0


def bare(completions, **kwargs):
  return 1.0


def repeats(data_source, solution_str, ground_truth, extra_info=None):
  """Predicts the whole answer; dies at the first 'die', if there is a file."""
  if solution_str == 'die' and os.path.exists(data_source):
    os.remove(data_source)
    os.abort()
  return {'score': 1.0, 'acc': 1.0, 'pred': solution_str}


def lazy(completions, **kwargs):
  return (len(c) + 'words' for c in completions)


def sleeps(data_source, solution_str, ground_truth, extra_info=None):
  time.sleep(0.4)
  return 1.0


def trl_reference(completions, answer, ground_truth, **kwargs):
  """As docs/rewards.md shows it: the raw column beside the reference."""
  assert answer[0].endswith(ground_truth[0])
  return [len(answer[0]) + (completions[0] == ground_truth[0]) / 2]
