"""Functions of a user: signatures, results, mistakes; built-in ones beside."""

import array
import dataclasses
import json
import os
import re
import time

import numpy as np
import pytest

from jetrl_jax.data import load_examples
from jetrl_jax.rewards import (
    RewardFunctionError,
    RewardPool,
    RewardRequest,
    RewardSpec,
    output,
)
from jetrl_jax.rewards.functions import build_term, check_references
from tests.rewards.pools import FUNCTIONS, custom, new_pool, request


@pytest.mark.parametrize(
    'name, message',
    [
        ('raises', "KeyError: 'no such key'"),
        ('exits', 'SystemExit: 3'),
    ],
)
def test_a_users_mistake_is_one_sentence_and_the_users_lines(name, message):
  with new_pool(custom(name)) as pool:
    with pytest.raises(RewardFunctionError) as caught:
      pool.score([request('x', source='gsm8k')])
  first, *lines = str(caught.value).splitlines()
  assert f":{name}' raised {message} at {FUNCTIONS}:" in first
  assert first.endswith("for an answer to a prompt of 'gsm8k':")
  assert len(lines) <= 5 and 'jetrl_jax' not in ''.join(lines[2:])
  assert f'in {name}' in lines[1]


def test_a_mistake_after_a_mistake_is_shown_and_cut():
  with new_pool(custom('chained')) as pool:
    with pytest.raises(RewardFunctionError, match="raised KeyError: 'xxx"):
      pool.score([request('x')])
    with pytest.raises(RewardFunctionError) as caught:
      pool.score([request('x')])
  assert len(str(caught.value)) < 11_000


def test_an_accuracy_outside_0_and_1_is_refused():
  with new_pool(custom('accurate')) as pool:
    with pytest.raises(
        RewardFunctionError, match="returned 7 as 'acc'; an accuracy must be"
    ):
      pool.score([request('x')])


def test_a_score_whose_square_is_no_number_is_refused():
  with new_pool(custom('large')) as pool:
    with pytest.raises(
        RewardFunctionError, match='returned 1e.300; allowed: numbers between'
    ):
      pool.score([request('x')])
  with pytest.raises(ValueError, match='between -1e.09 and 1e.09'):
    RewardSpec(function='math', weight=1e300)


def test_a_long_prediction_is_cut_and_votes_for_itself_alone():
  with new_pool(custom('predicts_all')) as pool:
    results = pool.score([request(r) for r in ('a', 'ab', 'a')])
  first, other, same = [r.prediction for r in results]
  assert len(first) < 1100 and first == same != other


@pytest.mark.parametrize('when', ['child first', 'parent first'])
def test_a_function_that_returns_in_two_processes_is_told_so(when):
  with new_pool(custom('forks')) as pool:
    with pytest.raises(
        RewardFunctionError, match='forks and returns in both processes'
    ) as caught:
      with pool.scoring() as scoring:
        scoring.add([request(when)])
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
          scoring.poll()
          time.sleep(0.05)
          if when == 'child first':
            scoring.results()
  assert '\n' not in str(caught.value)


def test_a_forked_child_that_exits_disturbs_nothing():
  with new_pool(custom('forks')) as pool:
    results = pool.score([request('exits')] * 5)
  assert [result.score for result in results] == [1.0] * 5


def test_what_functions_print_is_bounded(capfd):
  # Workers that print at the same time, on a machine that interrupts them.
  with new_pool(custom('prints'), num_workers=4, timeout_s=30) as pool:
    results = pool.score([request('x')] * 16)
  assert [result.score for result in results] == [1.0] * 16
  said = r'\n\[reward functions have printed more than 1024 KiB; .* shown\]\n'
  shown, times = re.subn(said, '', capfd.readouterr().out)
  assert times == 1
  # And a point past Python for each answer.
  assert len(shown) == 2**20 + 16


def test_no_interruption_gives_back_what_was_printed():
  read, write = os.pipe()
  portions, size = output._portions(3 * output._PORTION), output._PORTION
  one, other = (output._Bounded(write, portions, [0]) for _ in range(2))
  # One takes a portion and is interrupted; the other prints all it can.
  assert one._take()
  one._credit[0] += size
  for stream, text in ((other, b'a'), (one, b'b'), (other, b'c')):
    assert stream.write(text * 10 * size) == 10 * size
  shown = os.read(read, 1 << 16)
  for descriptor in (read, write, portions):
    os.close(descriptor)
  shown, times = re.subn(rb'\n\[reward functions .*\]\n', b'', shown)
  assert times == 1
  assert shown == b'a' * 2 * size + b'b' * size


@pytest.mark.parametrize(
    'name, returned',
    [
        ('not_finite', 'nan'),
        ('infinite', 'inf'),
        ('words', "'very good'"),
        ('text', "'1.0'"),
        ('forgets', 'None'),
        # 10**400, cut at 80 characters, and what repr refuses.
        ('huge', '1' + 76 * '0' + '...'),
        ('unwritable', 'a number too large to write (int)'),
    ],
)
def test_a_score_that_is_no_finite_number_is_refused_in_one_sentence(
    name, returned
):
  with new_pool(custom(name)) as pool:
    with pytest.raises(RewardFunctionError) as caught:
      pool.score([request('x')])
  said = str(caught.value)
  assert f":{name}' returned {returned}; a score must be a finite" in said
  assert 'return 0.0 for an answer that cannot be judged' in said
  assert '\n' not in said


def test_a_function_of_completions_that_returns_no_list_is_told_so():
  with new_pool(custom('bare')) as pool:
    with pytest.raises(RewardFunctionError, match='returned 1.0; a fun'):
      pool.score([request('x')])
  with new_pool(custom('lazy')) as pool:  # A mistake within is not the list's.
    with pytest.raises(RewardFunctionError, match='unsupported operand'):
      pool.score([request('x')])


def test_a_keyword_that_the_function_lacks_is_refused_at_the_start():
  with pytest.raises(RewardFunctionError, match=r"is given \['nope'\]"):
    new_pool(custom('obeys', kwargs={'nope': 1}))


@pytest.mark.parametrize(
    'target, message',
    [
        (f'{FUNCTIONS}:nothing', "has no function 'nothing'; it has"),
        (
            f'{FUNCTIONS.parents[1]}/__init__.py:nothing',
            "no function 'nothing'; it has none.",
        ),
        (f'{FUNCTIONS}:other', r"has the parameters \['a', 'b'\]; allowed"),
        (f'{FUNCTIONS}', "no function of it; write '.*.py:compute_score'"),
        ('/no/such/file.py:f', 'there is no file /no/such/file.py'),
        ('no_such_module.f', "No module named 'no_such_module'"),
        (f'{FUNCTIONS.with_name("aborts_on_import.py")}:f', "with 'crash'"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_at_the_start(
    target, message
):
  with pytest.raises(RewardFunctionError, match=message) as caught:
    new_pool(target)
  assert '\n' not in str(caught.value)


def test_a_file_imports_what_is_beside_it(tmp_path):
  (tmp_path / 'helper_of_mine.py').write_text('def half(): return 0.5\n')
  (tmp_path / 'mine.py').write_text(
      'from helper_of_mine import half\n'
      'def f(solution_str, ground_truth): return half()\n'
  )
  with new_pool(f'{tmp_path}/mine.py:f') as pool:
    assert pool.score([request('x')])[0].score == 0.5


def test_an_error_in_the_users_module_is_shown_with_its_lines(tmp_path):
  file = tmp_path / 'broken.py'
  file.write_text('import no_such_package\n')
  with pytest.raises(RewardFunctionError, match='(?s)Traceback.*broken.py'):
    new_pool(f'{file}:f')


def test_verls_signature_is_accepted_unchanged():
  with new_pool(
      custom('compute_score'),
      custom('with_kwargs', kwargs={'penalty': -0.5}),
      custom('sees_extra_info', weight=10.0),
  ) as pool:
    (result,) = pool.score(
        [request('is 18 !', extra_info={'index': 7}, other=1)]
    )
  # 1 + 7 characters * -0.5 + 10 * 7.
  assert result.score == 1 - 3.5 + 70
  assert result.parts == {
      'compute_score': 1.0,
      'with_kwargs': -3.5,
      'sees_extra_info': 7.0,
  }
  # 'acc' of the first function that gives one.
  assert result.accuracy == 0.0
  assert result.prediction == '!'


def test_a_function_is_called_as_its_author_reads_it(tmp_path):
  file = tmp_path / 'rewards.py'
  file.write_text(
      'def truth(data_source, solution_str, ground_truth, extra_info):\n'
      '  return float(ground_truth)\n'
      'def has_prompt(completions, **kwargs):\n'
      '  return [float("prompt" in kwargs)]\n'
      'def two(completions, **kwargs):\n'
      '  return [1.0, 2.0]\n'
  )

  def value(name, **kwargs):
    spec = RewardSpec(function=f'{file}:{name}', kwargs=kwargs)
    return build_term(spec)(request('x', '18', prompt='Q')).value

  assert value('truth') == 18.0
  # What the config gives goes before what the row has.
  assert value('truth', ground_truth='7') == 7.0
  # TRL passes the column as `prompts` alone.
  spec = RewardSpec(function=f'{file}:has_prompt')
  row = dataclasses.replace(request('x'), extra={'prompt': 'Q'})
  assert build_term(spec)(row).value == 0.0
  with pytest.raises(RewardFunctionError, match='2 values for 1 completion'):
    value('two')


def test_a_prediction_is_any_value_as_a_text_that_can_be_written():
  with new_pool(custom('predicts')) as pool:
    results = pool.score([request(r) for r in ('zero', 'nothing', 'half')])
  assert [result.prediction for result in results] == ['0', '', '?']


def test_token_ids_are_passed_as_trl_passes_them():
  with new_pool(custom('trl_ids')) as pool:
    ids = array.array('i', [5, 7, 2])
    asked = dataclasses.replace(request('x'), response_ids=ids)
    assert pool.score([asked])[0].score == 14.03
    assert pool.score([request('x')])[0].score == 0.0


@pytest.mark.parametrize(
    'name, missing',
    [('trl_state', 'trainer_state'), ('needs_model', 'reward_model')],
)
def test_a_parameter_that_nobody_gives_is_named_at_the_start(name, missing):
  said = rf"needs \['{missing}'\], which rewards are not"
  with pytest.raises(RewardFunctionError, match=said) as caught:
    new_pool(custom(name))
  assert '\n' not in str(caught.value)
  if name == 'needs_model':
    with new_pool(custom(name, kwargs={missing: 'x'})) as pool:
      assert pool.score([request('x')])[0].score == 1.0


def test_a_column_that_the_row_lacks_is_named_with_those_it_has():
  with new_pool(custom('trl_solution')) as pool:
    assert pool.score([request('x', solution='18')])[0].score == 1.0
    with pytest.raises(
        RewardFunctionError,
        match=r"needs \['solution'\], and a row of 's' has the columns "
        r"\['level'\]\.$",
    ):
      pool.score([request('x', level=3)])


def test_a_column_that_some_rows_lack_is_named_before_any_answer():
  spec = custom('trl_solution')
  rows = [('a', ('level', 'solution')), ('b', ('level',))]
  with pytest.raises(
      RewardFunctionError,
      match=r"needs \['solution'\], and a row of 'b' has the columns "
      r"\['level'\]\.$",
  ):
    new_pool(spec, columns=rows)
  # Enough: the column in all rows, or a value by reward.kwargs.
  build_term(spec, rows[:1])
  given = dataclasses.replace(spec, kwargs={'solution': ['18']})
  build_term(given, rows)
  # verl's arguments, and TRL's that come with every answer.
  for name in ('compute_score', 'trl_ids', 'trl_reference'):
    build_term(custom(name), [('b', ())])


def test_verls_and_trls_names_in_one_function_are_refused(tmp_path):
  file = tmp_path / 'mixed.py'
  file.write_text(
      'def both(solution_str, ground_truth, completion_ids):\n  return 1.0\n'
      'def trl(completions, solution_str=None):\n  return [1.0]\n'
  )
  with pytest.raises(
      RewardFunctionError,
      match="solution_str is verl's, and completions and completion_ids are"
      " TRL's; allowed: verl's",
  ):
    build_term(RewardSpec(function=f'{file}:both'))
  # Nothing is missing here.
  build_term(RewardSpec(function=f'{file}:trl'))


def test_a_reference_that_is_an_object_reaches_the_function():
  truth = {'target': 24, 'numbers': [1, 2, 12]}
  with new_pool(custom('countdown'), custom('trl_target')) as pool:
    results = pool.score([request(r, truth) for r in ('12*2', '12+1')])
  assert [r.parts for r in results] == [
      {'countdown': 1.0, 'trl_target': 24.0},
      {'countdown': 0.0, 'trl_target': 24.0},
  ]


@pytest.mark.parametrize('name', ['math', 'gsm8k', 'last_number'])
def test_built_in_rewards_refuse_objects_at_the_start(name):
  spec = RewardSpec(function=name)
  check_references([spec], [('18', 's')])
  check_references([RewardSpec(function='a.b')], [({'target': 24}, 's')])
  for answer in ({'target': 24}, ['24'], True):
    with pytest.raises(
        RewardFunctionError, match=f"{name}' compares texts and numbers"
    ) as caught:
      check_references([spec], [('18', 's'), (answer, 'countdown')])
    assert f"of 'countdown' is {answer!r}; name the" in str(caught.value)


def test_trl_gets_the_raw_column_answer_and_the_reference_beside(tmp_path):
  file = tmp_path / 'gsm8k.jsonl'
  solution = '40 + 32 = 72 #### 72'
  file.write_text(json.dumps({'question': 'How many?', 'answer': solution}))
  (row,) = load_examples([file], prompt_key='question', answer_key='answer')
  assert row.answer == '72'
  asked = dataclasses.replace(request('72', row.answer), extra=row.extra)
  with new_pool(custom('trl_reference')) as pool:
    assert pool.score([asked])[0].score == len(solution) + 0.5
    # Without a column of that name `answer` is the reference, too.
    assert pool.score([request('72', '72')])[0].score == 2.5
    # And a column `ground_truth` is the row's.
    with pytest.raises(RewardFunctionError, match='AssertionError'):
      pool.score([request('72', '72', ground_truth='73')])


@pytest.mark.parametrize('reward', ['math', 'gsm8k', 'last_number'])
@pytest.mark.parametrize('answer', [72, 72.0, np.int32(72)])
def test_a_number_is_a_reference_of_the_built_in_rewards(reward, answer):
  part = build_term(RewardSpec(function=reward))
  response = r'So #### 72' if reward == 'gsm8k' else r'So \boxed{72}'
  assert part(request(response, answer)).value == 1.0
  wrong = response.replace('72', '71')
  assert part(request(wrong, answer)).value == 0.0


@pytest.mark.parametrize('reward', ['math', 'gsm8k', 'last_number'])
@pytest.mark.parametrize('answer', [None, [72], True, float('nan')])
def test_a_reference_that_is_neither_text_nor_number_is_refused(reward, answer):
  with new_pool(reward) as pool:
    with pytest.raises(RewardFunctionError) as caught:
      pool.score([request('#### 72', answer)])
  assert f"reference answer of a prompt of 's' is {answer!r};" in str(
      caught.value
  )
  assert '\n' not in str(caught.value)


def test_a_response_that_is_no_text_is_refused():
  with pytest.raises(ValueError, match='response_text is None; it must be'):
    request(None)


def test_a_text_is_a_term_and_an_object_is_led_to_a_file():
  limits = dict(num_workers=1, timeout_s=5.0, memory_limit_mb=512)
  with RewardPool(['gsm8k'], **limits) as pool:
    assert pool.score([request('#### 18')])[0].score == 1.0
  with pytest.raises(ValueError, match=r"pass a list, \['gsm8k'\]"):
    RewardPool('gsm8k', **limits)
  with pytest.raises(
      ValueError, match="and name it: 'my_rewards.py:my_reward'"
  ):
    RewardPool([lambda completions: [1.0]], **limits)
  with pytest.raises(ValueError, match="name it: 'my_rewards.py:request'"):
    RewardSpec(function=request)
  with pytest.raises(ValueError, match=r'a reward is 3; allowed: math, gsm8k'):
    RewardSpec(function=3)


def test_trls_signature_is_accepted_unchanged():
  chat = [{'role': 'user', 'content': 'Q'}]
  with new_pool(
      custom('has_bold_text'),
      custom('trl_columns'),
      custom('trl_not_applicable', weight=100.0),
      custom('trl_async'),
  ) as pool:
    (result,) = pool.score([_chat(chat)])
  # One message in the conversation: trl_columns says 1.
  assert result.parts == {
      'has_bold_text': 1.0,
      'trl_columns': 1.0,
      'trl_async': 0.25,
  }
  assert result.score == 2.25


def test_an_answer_that_no_reward_applies_to_has_no_score(caplog):
  with new_pool(
      custom('trl_not_applicable'), custom('trl_for_numbers', weight=2.0)
  ) as pool:
    results = pool.score([request('18'), request('eighteen'), request('7')])
    pool.score([request('none')])
  assert [r.score for r in results] == [2.0, None, 2.0]
  # The first term that applies tells the accuracy.
  assert [r.accuracy for r in results] == [1.0, None, 1.0]
  assert [r.parts for r in results] == [
      {'trl_for_numbers': 1.0}, {}, {'trl_for_numbers': 1.0}
  ]  # fmt: skip
  assert caplog.messages == [
      '1 of 3 answers got no score, as every reward returned None; they are'
      ' left out of their groups. Said once: those of training steps are'
      ' counted as reward/unscored in metrics.jsonl.'
  ]


def _chat(messages):
  return RewardRequest(
      prompt_text='<|user|>Q',
      response_text='a **b**',
      answer='18',
      source='s',
      extra={'prompt': messages, 'level': 3},
  )


def test_a_dotted_path_names_a_function():
  with new_pool('tests.rewards.custom_functions.compute_score') as pool:
    assert pool.score([request('18')])[0].score == 1.0


_LAZY = """
import importlib, sys, types


class Lazy(types.ModuleType):
  __all__ = ['accuracy', 'broken']

  def __getattr__(self, name):
    if name == 'accuracy':
      return importlib.import_module('.functions', self.__name__).accuracy
    if name == 'broken':
      raise RuntimeError('Failed to import lazy.broken')
    raise AttributeError(f'module {self.__name__} has no attribute {name}')


module = Lazy(__name__)
vars(module).update(
    __path__=__path__, __spec__=__spec__, __all__=Lazy.__all__
)
sys.modules[__name__] = module
"""


def test_a_package_may_import_its_functions_when_they_are_asked_for(
    tmp_path, monkeypatch
):
  folder = tmp_path / 'lazy'
  folder.mkdir()
  (folder / '__init__.py').write_text(_LAZY)
  (folder / 'functions.py').write_text(
      'def accuracy(completions, **kwargs):\n  return [0.5]\n'
  )
  monkeypatch.syspath_prepend(tmp_path)
  with new_pool('lazy.accuracy') as pool:
    assert pool.score([request('x')])[0].score == 0.5
  with pytest.raises(
      RewardFunctionError, match=r"no function 'other'; it has.*'accuracy'"
  ):
    new_pool('lazy.other')
  with pytest.raises(RewardFunctionError, match='Failed to import lazy.broken'):
    new_pool('lazy.broken')


def test_built_in_rewards_add_up_by_weight():
  specs = [
      RewardSpec(function='gsm8k'),
      RewardSpec(
          function='format',
          weight=0.25,
          kwargs={'pattern': r'^<think>.*</think>'},
      ),
  ]
  with new_pool(*specs) as pool:
    results = pool.score(
        [
            request('<think>\n</think>\n#### 18'),
            request('<think></think> #### 17'),
            request('#### $18.00'),
            # Strict: words on the line, or a box, are not the format.
            request('#### 18 dollars'),
            request(r'\boxed{18}'),
        ]
    )
    assert [r.score for r in results] == [1.25, 0.25, 1.0, 0.0, 0.0]
    assert [r.accuracy for r in results] == [1, 0, 1, 0, 0]
    with pytest.raises(RewardFunctionError, match="'x'; use 'math' for it"):
      pool.score([request('#### 1', 'x')])


def test_the_last_number_is_an_answer_without_a_box():
  responses = [
      'There are 3 boxes. The answer is 42.',
      '**42.0**',
      r'\boxed{42}',
      'It is 42, or 7 by another count.',
      'I do not know.',
  ]
  with new_pool('last_number') as pool:
    results = pool.score([request(r, '42') for r in responses])
    assert [r.score for r in results] == [1, 1, 1, 0, 0]
    assert [r.accuracy for r in results] == [1, 1, 1, 0, 0]
    assert [r.prediction for r in results] == ['42', '42', '42', '7', '']
    with pytest.raises(
        RewardFunctionError, match="'last_number' compares numbers, and the"
    ):
      pool.score([request('1', 'x')])
  after = RewardSpec(function='last_number', kwargs={'after': '</think>'})
  with new_pool(after) as pool:
    results = pool.score([request(r, '42') for r in ('42</think>', '42')])
  assert [r.score for r in results] == [0, 0]


def test_an_answer_may_be_asked_for_after_the_reasoning():
  thought = r'<think>\boxed{18} #### 18</think>'
  responses = [
      thought + r'So \boxed{18}',
      thought + r'So \boxed{17}',
      # The only box is in the reasoning.
      thought + 'So 18.',
      r'<think>\boxed{18}',
      # The last end of reasoning counts.
      thought + r'\boxed{18} <think> no </think> #### 18',
  ]
  after = {'after': '</think>'}
  for name, anywhere, afterwards in (
      ('math', [1, 0, 1, 1, 1], [1, 0, 0, 0, 1]),
      ('gsm8k', [0, 0, 0, 0, 1], [0, 0, 0, 0, 1]),
  ):
    for kwargs, expected in (({}, anywhere), (after, afterwards)):
      with new_pool(RewardSpec(function=name, kwargs=kwargs)) as pool:
        scores = [r.score for r in pool.score([request(r) for r in responses])]
      assert scores == expected, (name, kwargs)
