"""Functions of a user: signatures, results, mistakes; built-in ones beside."""

import pytest

from jetrl_jax.rewards import RewardFunctionError, RewardRequest, RewardSpec
from tests.rewards.pools import FUNCTIONS, custom, new_pool, request


@pytest.mark.parametrize(
    'name, message',
    [
        ('raises', "KeyError: 'no such key'"),
        ('exits', 'SystemExit: 3'),
    ],
)
def test_a_users_mistake_stops_the_run_with_its_traceback(name, message):
  with new_pool(custom(name)) as pool:
    with pytest.raises(RewardFunctionError, match=f'(?s){name}.*{message}'):
      pool.score([request('x')])


@pytest.mark.parametrize(
    'name, returned',
    [
        ('not_finite', 'nan'),
        ('infinite', 'inf'),
        ('words', "'very good'"),
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
        (f'{FUNCTIONS}:other', r"has the parameters \['a', 'b'\]; allowed"),
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


def test_a_prediction_is_any_value_as_a_text_that_can_be_written():
  with new_pool(custom('predicts')) as pool:
    results = pool.score([request(r) for r in ('zero', 'nothing', 'half')])
  assert [result.prediction for result in results] == ['0', '', '?']


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
