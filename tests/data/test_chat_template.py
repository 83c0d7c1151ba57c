import contextlib
import pathlib
import time

import pytest

from jetrl_jax.data import (
    ChatFormat,
    ChatRenderer,
    Example,
    PlainFormat,
    Tokenizer,
    chat_template,
    render_chat,
)
from tests.data.small import write_tokenizer

QWEN3 = (
    pathlib.Path(__file__).parent / 'fixtures/qwen3_chat_template.jinja'
).read_text()
HELLO = [{'role': 'user', 'content': 'Hi <b>'}]


def _render(template, messages=None, **variables):
  (text,) = render_chat(
      template, [HELLO if messages is None else messages], variables=variables
  )
  return text


def _example(prompt):
  return Example(id=0, prompt=prompt, answer='1', source='s', extra={})


def test_qwen3s_own_template_opens_the_assistants_turn():
  assert _render(QWEN3) == (
      '<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n'
  )
  system = [{'role': 'system', 'content': 'S'}, *HELLO]
  assert _render(QWEN3, system).startswith('<|im_start|>system\nS<|im_end|>\n')


def test_a_setting_of_the_template_reaches_it():
  assert _render(QWEN3, enable_thinking=False).endswith(
      '<|im_start|>assistant\n<think>\n\n</think>\n\n'
  )


def test_a_setting_may_be_a_line_at_the_top_of_the_template():
  own = '{% set enable_thinking = false %}\n' + QWEN3
  assert _render(own) == _render(QWEN3, enable_thinking=False)


def test_without_a_generation_prompt_the_text_ends_with_the_last_message():
  (text,) = render_chat(
      QWEN3, [HELLO], variables={}, add_generation_prompt=False
  )
  assert text == '<|im_start|>user\nHi <b><|im_end|>\n'


def test_what_templates_are_written_for_is_there():
  assert _render('{{ messages[0] | tojson }}') == (
      '{"role": "user", "content": "Hi <b>"}'
  )
  # Blocks on lines of their own leave no blank.
  assert _render('a\n  {% if true %}\nb\n  {% endif %}\nc') == 'a\nb\nc'
  assert _render('{% for i in range(9) %}{{ i }}{% break %}{% endfor %}') == '0'
  assert (
      _render('{% generation %}x{{ bos }}{% endgeneration %}', bos='B') == 'xB'
  )
  assert _render('{{ tools is none }}') == 'True'


def test_the_date_is_the_same_on_every_day():
  # Llama 3's fall-back; with today's date a resumed run would see other tokens.
  assert _render("{{ strftime_now('%d %b %Y') }}") == '26 Jul 2024'


def test_a_template_may_refuse_a_conversation():
  with pytest.raises(ValueError, match='roles must alternate'):
    _render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    'template',
    [
        '{% for a in b %}',
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({'role': 'x', 'content': 'y'}) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        '{{ range(1000000) }}',
        '{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}',
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_that_breaks_or_reaches_out_is_a_value_error(template):
  with pytest.raises(ValueError, match='the chat template failed'):
    _render(template)


@pytest.mark.parametrize(
    'template',
    [
        "{{ 'x' * 10**10 }}",
        "{{ '%09999999999d' | format(1) }}",
        '{% for a in range(99999) %}{{ messages[0].content * 9 }}{% endfor %}',
        '{% set ns = namespace(s="xx") %}{% for a in range(99) %}'
        '{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}',
    ],
)
def test_a_template_that_blows_up_is_a_value_error(template):
  with pytest.raises(ValueError, match='the chat template'):
    _render(template)


@pytest.mark.parametrize(
    'template',
    [
        '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}'
        '{% endfor %}',
        '{{ 10 ** (10 ** 10) }}',
    ],
)
def test_a_template_that_never_ends_is_killed(template):
  start = time.monotonic()
  with pytest.raises(ValueError, match='did not finish within 1.0 s'):
    render_chat(template, [HELLO], variables={}, base_seconds=1.0)
  assert time.monotonic() - start < 5


def test_a_process_that_stays_renders_alike_and_is_replaced_when_it_fails():
  some = '{% for a in range(99999) %}'
  forever = f'{some}{some}{{% endfor %}}{{% endfor %}}'
  template = (
      '{% if messages[0].content == "loop" %}' + forever + '{% endif %}'
      '{% if messages[0].content == "raise" %}{{ raise_exception("no") }}'
      '{% endif %}{% if messages[0].content == "blow" %}'
      '{{ "%09999999999d" | format(1) }}{% endif %}' + QWEN3
  )
  with contextlib.closing(
      ChatRenderer(template, {}, base_seconds=1.0)
  ) as render:
    expected = render_chat(template, [HELLO], variables={})
    assert [render(HELLO)] == expected
    first = render._process
    with pytest.raises(ValueError, match='failed: TemplateError: no'):
      render([{'role': 'user', 'content': 'raise'}])
    assert [render(HELLO)] == expected and render._process is first
    with pytest.raises(ValueError, match='did not finish within 1.0 s'):
      render([{'role': 'user', 'content': 'loop'}])
    assert [render(HELLO)] == expected
    render._process.kill()
    render._process.wait()
    assert [render(HELLO)] == expected
    blows_up = [{'role': 'user', 'content': 'blow'}]
    with pytest.raises(ValueError, match='the chat template'):
      render(blows_up)
    assert [render(HELLO)] == expected


def test_the_memory_limit_is_not_one_of_the_size_of_the_data(monkeypatch):
  monkeypatch.setattr(chat_template, '_MEMORY_BYTES', 2**26)
  monkeypatch.setattr(chat_template, '_AT_ONCE', 100)
  chat = [{'role': 'user', 'content': 'x'}]
  texts = render_chat(
      '{{ messages[0].content * 200000 }}', [chat] * 300, variables={}
  )
  assert texts == ['x' * 200_000] * 300


def test_the_chat_format_adds_system_and_instruction(tmp_path):
  tokenizer = Tokenizer(write_tokenizer(tmp_path))
  chat = ChatFormat(system='Be brief.', instruction=' Box it.')
  texts, conversations = chat.apply([_example('1+1?')], tokenizer)
  assert texts == [
      '<|system|>Be brief.<|end|><|user|>1+1? Box it.<|end|><|assistant|>'
  ]
  assert conversations[0][1] == {'role': 'user', 'content': '1+1? Box it.'}


def test_a_conversation_keeps_its_own_system_message_and_is_not_changed():
  prompt = [{'role': 'system', 'content': 'Own.'}, *HELLO]
  messages = ChatFormat(system='Other.', instruction='!').messages(
      _example(prompt)
  )
  assert [m['content'] for m in messages] == ['Own.', 'Hi <b>!']
  assert prompt[1]['content'] == 'Hi <b>'


def test_a_template_is_given_every_special_token_of_the_tokenizer(tmp_path):
  names = ['bos', 'eos', 'unk', 'sep', 'pad', 'cls', 'mask', 'image', 'audio']
  named = ' '.join('{{ ' + name + '_token }}' for name in names)
  others = (
      '{{ additional_special_tokens | join }} {{ add_bos_token is defined }}'
  )
  config = {
      'bos_token': '<|bos|>',
      'eos_token': '<|end|>',
      'unk_token': '<|unk|>',
      'sep_token': {'content': '<|sep|>', 'special': True},
      'pad_token': '<|pad|>',
      'cls_token': '<|cls|>',
      'mask_token': '<|mask|>',
      'image_token': '<|image|>',
      'extra_special_tokens': {'audio_token': '<|audio|>'},
      'additional_special_tokens': ['<|a|>', {'content': '<|b|>'}],
      'add_bos_token': False,
      'added_tokens_decoder': {},
      'chat_template': f'{named} {others}',
  }
  # Read only where added_tokens_decoder is missing.
  stale = '{"sep_token": "<|stale|>"}'
  write_tokenizer(tmp_path, config=config, special_tokens_map_json=stale)
  (text,), _ = ChatFormat().apply([_example('x')], Tokenizer(tmp_path))
  assert text == (
      '<|bos|> <|end|> <|unk|> <|sep|> <|pad|> <|cls|> <|mask|> <|image|>'
      ' <|audio|> <|a|><|b|> False'
  )


def test_a_special_token_that_is_not_there_is_not_defined(tmp_path):
  config = {
      'eos_token': '<|end|>',
      'sep_token': None,
      'chat_template': '{{ sep_token is defined }}'
      ' {{ additional_special_tokens is defined }}',
  }
  write_tokenizer(tmp_path, config=config)
  (text,), _ = ChatFormat().apply([_example('x')], Tokenizer(tmp_path))
  assert text == 'False False'


def test_an_old_checkpoint_names_its_tokens_in_special_tokens_map(tmp_path):
  config = {
      'sep_token': '<|old|>',
      'chat_template': '{{ eos_token }}{{ sep_token }}'
      '{{ additional_special_tokens[0] }}',
  }
  map = (
      '{"eos_token": "<|end|>", "sep_token": {"content": "<|sep|>"},'
      ' "additional_special_tokens": ["<|a|>"]}'
  )
  write_tokenizer(tmp_path, config=config, special_tokens_map_json=map)
  (text,), _ = ChatFormat().apply([_example('x')], Tokenizer(tmp_path))
  assert text == '<|end|><|sep|><|a|>'


def test_a_tokenizer_without_template_points_at_the_plain_one(tmp_path):
  write_tokenizer(tmp_path, config={'eos_token': '<|end|>'})
  with pytest.raises(ValueError, match='has no chat template; use a plain one'):
    ChatFormat().apply([_example('x')], Tokenizer(tmp_path))


def test_a_plain_template_is_literal_but_for_the_prompt(tmp_path):
  tokenizer = Tokenizer(write_tokenizer(tmp_path))
  plain = PlainFormat(template='Q: {prompt}\n\\boxed{}, {x}')
  texts, _ = plain.apply([_example('{y} \\1')], tokenizer)
  assert texts == ['Q: {y} \\1\n\\boxed{}, {x}']
  with pytest.raises(ValueError, match='a plain template takes text'):
    plain.apply([_example(HELLO)], tokenizer)
  with pytest.raises(ValueError, match="must hold '{prompt}' exactly once"):
    PlainFormat(template='no place')
