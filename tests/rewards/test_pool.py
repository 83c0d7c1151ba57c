"""Workers and their limits: what hangs, dies or takes too much."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from jetrl_jax.rewards import RewardFunctionError, RewardSpec, Scoring
from tests.rewards.hostile import HOSTILE
from tests.rewards.pools import LIMIT, custom, new_pool, request

# What the pool may add: a kill, and this machine's scheduler.
SLACK = 0.25
# A killed worker's successor, and the good answers, on a busy machine.
START = 1.0


@pytest.fixture(name='pool', scope='module')
def _math_pool():
  with new_pool('math') as pool:
    yield pool


@pytest.fixture(name='obedient', scope='module')
def _obedient_pool():
  with new_pool(custom('obeys'), num_workers=2) as pool:
    yield pool


def test_results_come_in_order_with_score_accuracy_and_prediction(pool):
  results = pool.score(
      [
          request(r'\boxed{17}'),
          request(r'\boxed{\frac{36}{2}}'),
          request('#### 18'),
          request('I do not know.'),
      ]
  )
  assert [r.score for r in results] == [0, 1, 1, 0]
  assert [r.accuracy for r in results] == [0, 1, 1, 0]
  # Right answers vote for the same text.
  assert [r.prediction for r in results] == ['17', '18', '18', '']
  assert results[1].parts == {'math': 1.0}
  assert all(r.error is None for r in results)
  assert pool.score([]) == []


def test_every_hostile_answer_is_bounded_and_worth_nothing(pool):
  good = request(r'\boxed{18}')
  for name, response in HOSTILE.items():
    start = time.monotonic()
    first, hostile, last = pool.score([good, request(response), good])
    seconds = time.monotonic() - start
    assert hostile.score == 0, name
    assert first.score == last.score == 1, name
    assert seconds < LIMIT + SLACK + START, name
  assert not pathlib.Path('OWNED').exists()


def test_some_hostile_answers_are_stopped_by_the_clock_alone(pool):
  # So that the test above is not about rules only.
  (result,) = pool.score([request(HOSTILE['sum of fractions'])])
  assert result.error == 'timeout'


def test_what_a_rule_can_tell_costs_no_worker():
  names = [n for n in HOSTILE if re.search('power|braces|equation', n)]
  requests = [
      request(HOSTILE[name], reference)
      for name in names
      for reference in ('18', 'y = 2x + 1', 'x^2 = 1')
  ]
  # Each of them took more than five seconds, or would have for ever.
  with new_pool('math', timeout_s=5.0) as pool:
    results = pool.score(requests)
  assert {result.error for result in results} <= {None, 'refused'}
  assert all(result.score == 0 for result in results)


def test_the_result_does_not_depend_on_the_number_of_workers():
  requests = [request(f'#### {i}', str(i % 3)) for i in range(100)]
  with new_pool('gsm8k') as one, new_pool('gsm8k', num_workers=3) as three:
    assert one.score(requests) == three.score(requests)


def test_an_answer_that_hangs_takes_no_other_with_it(obedient):
  requests = [request('hang' if i == 5 else 'ok') for i in range(40)]
  start = time.monotonic()
  results = obedient.score(requests)
  seconds = time.monotonic() - start
  assert [i for i, r in enumerate(results) if r.error] == [5]
  assert results[5].error == 'timeout' and results[5].parts == {'obeys': 0.0}
  assert sum(r.score for r in results) == 39
  assert LIMIT <= seconds < LIMIT + SLACK + START


def test_answers_are_scored_while_others_are_made(obedient):
  with obedient.scoring() as scoring:
    scoring.add([request('ok'), request('late')])
    scoring.poll()
    # Both have answered when they are next looked at, one of them too late.
    time.sleep(LIMIT + 0.3)
    scoring.poll()
    scoring.add([request('pid')])
    deadline = time.monotonic() + 5
    while len(scoring.replies) < 3 and time.monotonic() < deadline:
      scoring.poll()
      time.sleep(0.01)
    results = scoring.results()
  assert [r.error for r in results] == [None, 'timeout', None]
  assert results[2].score > 1


def test_how_rarely_the_pool_looks_changes_no_score(tmp_path):
  file = tmp_path / 'once'
  file.touch()
  long = request('x' * 32_000)  # A few of them fill the socket.
  dies = request('die', source=str(file))
  with new_pool(custom('repeats')) as pool, pool.scoring() as scoring:
    for requests in ([long] * 24, [request('ok'), dies] * 2):
      scoring.add(requests)
      scoring.poll()
      time.sleep(LIMIT + 0.1)
      scoring.poll()
      results = scoring.results()
  assert not file.exists()
  assert all(r.error is None and r.score == 1.0 for r in results)


def test_a_worker_that_is_done_has_answers_again_after_a_look(obedient):
  with obedient.scoring() as scoring:
    _start_all(obedient)
    scoring.add([request('ok')] * 64)
    scoring.poll()
    while scoring.waiting:
      assert all(w.assigned for w in obedient._workers if w.ready)
      time.sleep(0.02)
      scoring.poll()


def _start_all(pool):
  nothing = Scoring(pool)
  while len(pool._workers) < 2 or not all(w.ready for w in pool._workers):
    pool.serve(nothing, wait=True)


def test_answers_are_given_to_workers_that_are_ready_and_have_none(obedient):
  with obedient.scoring() as scoring:
    _start_all(obedient)
    obedient._drop(obedient._workers[0])
    scoring.add([request('hang')] * 64)
    scoring.poll()  # Starts another worker.
    ready, starting = obedient._workers
    given = len(ready.assigned)
    assert given and not starting.assigned
    scoring.poll()
    assert len(ready.assigned) == given


def test_answers_sent_to_a_worker_that_has_just_died_are_scored(obedient):
  with obedient.scoring() as scoring:
    _start_all(obedient)
    for worker in obedient._workers:
      signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
    time.sleep(0.1)
    scoring.add([request('ok')] * 9)
    obedient._hand_out(scoring)
    assert [r.score for r in scoring.results()] == [1.0] * 9


def test_what_is_under_way_when_the_scoring_ends_is_given_up(obedient):
  with pytest.raises(KeyError), obedient.scoring() as scoring:
    scoring.add([request('hang')])
    scoring.poll()
    raise KeyError
  assert [r.score for r in obedient.score([request('ok')] * 9)] == [1.0] * 9


def test_answers_that_crash_or_need_too_much_memory_count_zero(obedient):
  results = obedient.score([request(x) for x in ('crash', 'memory', 'ok')])
  assert [r.error for r in results] == ['crash', 'memory', None]
  assert [r.score for r in results] == [0, 0, 1]


def test_a_worker_that_earlier_answers_have_filled_is_replaced():
  # Room for five of a hundred megabytes, and never for the last.
  requests = [*[request('100_000_000')] * 12, request('1_000_000_000')]
  with new_pool(custom('keeps'), num_workers=2) as pool:
    for _ in range(2):
      *kept, large = pool.score(requests)
      assert [result.error for result in kept] == [None] * 12
      assert large.error == 'memory'


def test_the_first_answer_that_breaks_a_limit_warns_and_no_other(caplog):
  broken = [request(x) for x in ('hang', 'crash', 'memory', 'ok', 'crash')]
  with new_pool(custom('obeys'), num_workers=2) as pool:
    pool.score([request('ok')])
    assert not caplog.messages
    pool.score(broken)
    pool.score(broken)
  rest = (
      'Said once: those of training steps are counted as reward/{} in'
      ' metrics.jsonl.'
  )
  assert caplog.messages == [
      "1 of 5 rewards ended with 'timeout' and count 0; the limit is"
      f' reward.timeout_s=0.5 seconds. {rest.format("timeout")}',
      "2 of 5 rewards ended with 'crash' and count 0; the limit is two dead"
      f' workers for one answer. {rest.format("crash")}',
      "1 of 5 rewards ended with 'memory' and count 0; the limit is"
      f' reward.memory_limit_mb=512 MiB. {rest.format("memory")}',
  ]


def test_a_worker_keeps_an_address_space_that_is_limited_already():
  script = (
      'import resource\n'
      'from jetrl_jax.rewards import worker\n'
      'resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))\n'
      'for megabytes in (2**15, 2**13):\n'
      '  worker._limit_memory(megabytes)\n'
      '  print(resource.getrlimit(resource.RLIMIT_AS)[0] == 2**34)\n'
  )
  found = subprocess.run(
      [sys.executable, '-c', script], capture_output=True, text=True, check=True
  )
  assert found.stdout.split() == ['True', 'False']


def test_a_worker_has_no_jax(obedient):
  (result,) = obedient.score([request('jax')])
  assert result.score == 0.0


def test_a_worker_killed_from_outside_is_replaced(obedient):
  (result,) = obedient.score([request('pid')])
  assert result.error is None  # The number 0 would be our own group's.
  os.kill(int(result.score), signal.SIGKILL)
  assert [r.score for r in obedient.score([request('ok')] * 9)] == [1.0] * 9


def test_a_worker_killed_while_it_starts_is_replaced(obedient):
  for _ in range(3):  # As often in a row would end the run.
    _start_all(obedient)
    obedient._drop(obedient._workers[0])
    starting = obedient._fork_server.fork()
    obedient._workers.append(starting)
    signal.pidfd_send_signal(starting.pidfd, signal.SIGKILL)
    assert [r.score for r in obedient.score([request('ok')] * 9)] == [1.0] * 9


def test_importing_a_module_may_take_longer_than_an_answer(tmp_path):
  file = tmp_path / 'slow.py'
  file.write_text(
      f'import time\ntime.sleep({LIMIT + 0.2})\n'
      'def score(data_source, solution_str, ground_truth, extra_info=None):\n'
      '  return 1.0\n'
  )
  with new_pool(f'{file}:score') as pool:
    assert pool.score([request('ok')])[0].score == 1.0


def test_workers_and_their_fork_server_ignore_ctrl_c():
  # One worker, and time: another worker's number would say nothing.
  with new_pool(custom('obeys'), timeout_s=60.0) as pool:
    (result,) = pool.score([request('pid')])
    assert result.error is None
    os.kill(int(result.score), signal.SIGINT)
    os.kill(pool._fork_server.process.pid, signal.SIGINT)
    (again,) = pool.score([request('pid')])
    assert again.score == result.score
    assert pool._fork_server.process.poll() is None


def test_a_fork_server_killed_from_outside_is_replaced(obedient):
  obedient._fork_server.process.kill()
  results = obedient.score([request('hang'), request('ok')])
  assert [r.score for r in results] == [0.0, 1.0]
  _start_all(obedient)
  obedient._fork_server.process.kill()
  time.sleep(0.2)  # No answer is given to the dead, which would count.
  assert [r.score for r in obedient.score([request('ok')])] == [1.0]


def test_a_worker_that_fails_at_once_is_heard_on_a_slow_machine(monkeypatch):
  pidfd_open = os.pidfd_open

  def late(pid):
    time.sleep(0.5)  # Longer than a worker takes to find no file.
    return pidfd_open(pid)

  monkeypatch.setattr(os, 'pidfd_open', late)
  with pytest.raises(RewardFunctionError, match='there is no file'):
    new_pool('/no/such/file.py:f')


def test_a_pattern_that_backtracks_for_ever_is_bounded():
  spec = RewardSpec(function='format', kwargs={'pattern': '^(a+)+$'})
  with new_pool(spec) as pool:
    results = pool.score([request('a' * 60 + 'b'), request('aa')])
  assert [r.error for r in results] == ['timeout', None]


@pytest.mark.parametrize(
    'kwargs, message',
    [
        ({'function': 'maths'}, "'maths' is neither built in"),
        ({'function': 'math', 'weight': float('nan')}, 'it must be finite'),
        ({'function': 'format'}, r"takes exactly \['pattern'\]"),
        ({'function': 'math', 'kwargs': {'x': 1}}, "takes 'after' or none"),
        ({'function': 'math', 'kwargs': {'after': ''}}, "'after' .* is ''"),
        ({'function': 'gsm8k', 'kwargs': {'after': 1}}, "'after' .* is 1"),
        (
            {'function': 'format', 'kwargs': {'pattern': '('}},
            'is not a regular expression',
        ),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(kwargs, message):
  with pytest.raises(ValueError, match=message):
    RewardSpec(**kwargs)


def test_a_pool_needs_rewards_with_different_names_and_positive_limits():
  with pytest.raises(ValueError, match='each needs a name of its own'):
    new_pool('math', 'math')
  with pytest.raises(ValueError, match='at least one'):
    new_pool()
  with pytest.raises(ValueError, match='reward.timeout_s is 0; allowed: 0.01'):
    new_pool('math', timeout_s=0)


@pytest.mark.parametrize(
    ('answer', 'error'), [('child', 'timeout'), ('orphan', 'crash')]
)
def test_what_a_reward_function_started_is_killed_with_its_worker(
    obedient, tmp_path, answer, error
):
  where = tmp_path / 'pid'
  (result,) = obedient.score([request(answer, source=str(where))])
  assert result.score == 0 and result.error == error
  child = int(where.read_text())
  deadline = time.monotonic() + 5
  while _is_alive(child) and time.monotonic() < deadline:
    time.sleep(0.01)
  assert not _is_alive(child)


def test_what_a_dead_worker_started_ends_though_another_is_replaced(
    obedient, tmp_path
):
  where = tmp_path / 'pid'
  answers = ['ok', 'orphan', 'hang', *['ok'] * 5]  # Two for the first worker.
  with obedient.scoring() as scoring:
    _start_all(obedient)
    scoring.add([request(answer, source=str(where)) for answer in answers])
    scoring.poll()
    while not (where.exists() and where.read_text().strip()):
      time.sleep(0.01)
    time.sleep(LIMIT + 0.2)
    scoring.poll()
  deadline = time.monotonic() + 5
  while _is_alive(where.read_text().strip()) and time.monotonic() < deadline:
    time.sleep(0.01)
  assert not _is_alive(where.read_text().strip())


def test_a_closed_pool_says_so():
  pool = new_pool(custom('obeys'))
  pool.close()
  with pytest.raises(ValueError, match='is closed'):
    pool.score([request('x')])


def test_all_processes_die_with_the_trainer():
  # The trainer is killed while one worker hangs and one idles.
  script = (
      'import threading, time\n'
      'from tests.rewards.pools import custom, new_pool, request\n'
      'pool = new_pool(custom("obeys"), num_workers=2, timeout_s=60)\n'
      'pids = [w.pidfd for w in pool._workers]\n'
      'def pid(fd):\n'
      '  with open(f"/proc/self/fdinfo/{fd}") as info:\n'
      '    return [l.split()[1] for l in info if l.startswith("Pid")][0]\n'
      'print(pool._fork_server.process.pid, *map(pid, pids), flush=True)\n'
      'pool.score([request("hang")])\n'
  )
  if sys.platform != 'linux':
    pytest.skip('processes are told of a death by Linux alone')
  with subprocess.Popen(
      [sys.executable, '-c', script],
      stdout=subprocess.PIPE,
      cwd=pathlib.Path(__file__).parents[2],
  ) as trainer:
    assert trainer.stdout is not None
    pids = [int(p) for p in trainer.stdout.readline().split()]
    assert len(pids) == 3
    time.sleep(0.3)
    trainer.kill()
  deadline = time.monotonic() + 10
  while any(map(_is_alive, pids)) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not any(map(_is_alive, pids))


def _is_alive(pid):
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except FileNotFoundError:
    return False
  # A zombie waits for its parent only.
  return stat.rsplit(')', 1)[1].split()[0] != 'Z'


def test_good_answers_are_scored_fast(pool):
  requests = [
      request(f'2 * {i}\n#### {2 * i}', str(2 * i)) for i in range(2000)
  ]
  start = time.monotonic()
  results = pool.score(requests)
  rate = len(requests) / (time.monotonic() - start)
  assert sum(r.score for r in results) == 2000
  # The promise is 800 per second on two idle cores; this is one worker on a
  # machine that may be busy.
  assert rate > 200


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_ten_thousand_hostile_answers_stall_nothing():
  responses = list(HOSTILE.values())
  worst = 0.0
  with new_pool('math', num_workers=2, timeout_s=1.0) as pool:
    for i in range(10_000):
      batch = [
          request(r'\boxed{18}'),
          request(responses[i % len(responses)], str(i)),
      ]
      start = time.monotonic()
      good, hostile = pool.score(batch)
      worst = max(worst, time.monotonic() - start)
      assert good.score == 1
      assert hostile.score == 0
  assert worst < 1.0 + SLACK


def test_neither_rewards_nor_data_import_jax():
  done = subprocess.run(
      [
          *(sys.executable, '-c'),
          'import sys, jetrl_jax.data, jetrl_jax.rewards;'
          ' sys.exit("jax" in sys.modules)',
      ],
      cwd=pathlib.Path(__file__).parents[2],
      check=False,
  )
  assert done.returncode == 0
