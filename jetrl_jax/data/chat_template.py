"""From an example to the text that is tokenised.

Two ways, one type each: the tokenizer's own chat template, or a plain text
with a place for the prompt. A chat template is a program that came with a
checkpoint. Jinja's sandbox keeps it from our objects but does not bound it -
two nested ranges of 100,000 never end, and 'x' * 10**9 needs no loop - so it
runs in a process with a memory limit that is killed when its time is over.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

from jetrl_jax.data.tokenizer import Tokenizer
from jetrl_jax.data.types import Example, Message

# -P keeps Python from searching the script's folder, whose types.py would hide
# the standard library's.
_COMMAND = [
    *(sys.executable, '-P'),
    str(pathlib.Path(__file__).with_name('render_process.py')),
]
_MEMORY_BYTES = 2**30
_MAX_CHARS = 1_000_000
# Conversations per process. The memory limit is meant for the template, so it
# must not depend on the size of the data.
_AT_ONCE = 10_000
_PROCESSES = min(8, os.cpu_count() or 1)
# The time limit: the start of the process, and a share per conversation. Qwen's
# and Llama's templates take about 0.05 ms for each.
_BASE_SECONDS = 10.0
_SECONDS_PER_TEXT = 0.01
# The date that `strftime_now` returns. Llama 3 writes today's date into its
# system prompt, so a run that is resumed tomorrow would see other tokens. This
# is the date that its template falls back to.
_DATE = '2024-07-26'


def render_chat(
    template: str,
    conversations: Sequence[Sequence[Message]],
    *,
    variables: dict[str, Any],
    add_generation_prompt: bool = True,
    base_seconds: float = _BASE_SECONDS,
) -> list[str]:
  """Renders conversations with a chat template, bounded in time and memory.

  Args:
    template: Jinja source, as in tokenizer_config.json.
    conversations: lists of {'role', 'content'}.
    variables: further names the template may use: the special tokens, and
      settings of its own such as Qwen3's `enable_thinking`.
    add_generation_prompt: whether to end with the opening of an answer.
    base_seconds: time limit in seconds, to which 10 ms per text are added; of
      each process, which takes 10,000 conversations.

  Returns:
    One text per conversation.

  Raises:
    ValueError: the template is malformed, raises, refuses the conversation,
      or passes a limit of time, memory or output.
  """
  if len(conversations) > _AT_ONCE:
    render = functools.partial(
        render_chat,
        template,
        variables=variables,
        add_generation_prompt=add_generation_prompt,
        base_seconds=base_seconds,
    )
    parts = [
        conversations[first : first + _AT_ONCE]
        for first in range(0, len(conversations), _AT_ONCE)
    ]
    # Threads, each of which waits for a process.
    with concurrent.futures.ThreadPoolExecutor(_PROCESSES) as pool:
      return [text for texts in pool.map(render, parts) for text in texts]
  seconds = base_seconds + _SECONDS_PER_TEXT * len(conversations)
  job = _job(template, conversations, variables, add_generation_prompt)
  try:
    done = subprocess.run(
        _COMMAND,
        input=job,
        capture_output=True,
        timeout=seconds,
        check=False,
    )
  except subprocess.TimeoutExpired:
    raise _late(seconds, len(conversations)) from None
  if done.returncode != 0:
    raise _ended(done.returncode, done.stderr)
  return _texts(done.stdout)


class ChatRenderer:
  """Renders conversations one by one, in a process that stays.

  For a server: starting Python takes longer than most templates. The limits are
  those of `render_chat`; a process that passes one is replaced. Close it.

  Args:
    template: Jinja source, as in tokenizer_config.json.
    variables: further names the template may use.
    base_seconds: time limit in seconds for each conversation.
  """

  def __init__(
      self,
      template: str,
      variables: dict[str, Any],
      base_seconds: float = _BASE_SECONDS,
  ):
    self._template, self._variables = template, variables
    self._seconds = base_seconds
    self._lock = threading.Lock()
    self._process: subprocess.Popen[bytes] | None = None

  def __call__(self, conversation: Sequence[Message]) -> str:
    """Returns the text of a conversation, opened for an answer.

    Raises:
      ValueError: see `render_chat`.
    """
    job = _job(self._template, [conversation], self._variables, True)
    with self._lock:
      process = self._started()
      assert process.stdin is not None and process.stdout is not None
      late = threading.Event()

      def stop() -> None:
        late.set()
        process.kill()

      timer = threading.Timer(self._seconds, stop)
      timer.start()
      try:
        process.stdin.write(job)
        process.stdin.flush()
        answer = process.stdout.readline()
      except OSError:  # It ended before it had read everything.
        answer = b''
      finally:
        timer.cancel()
      if not answer.endswith(b'\n'):
        self._close()
        if late.is_set():
          raise _late(self._seconds, 1)
        raise _ended(process.returncode, b'')
    return _texts(answer)[0]

  def close(self) -> None:
    """Ends the process."""
    with self._lock:
      self._close()

  def _started(self) -> subprocess.Popen[bytes]:
    if self._process is not None and self._process.poll() is not None:
      self._close()  # It was killed.
    if self._process is None:
      self._process = subprocess.Popen(
          _COMMAND,
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=subprocess.DEVNULL,
          # The server handles Ctrl-C; what runs may finish.
          start_new_session=True,
      )
    return self._process

  def _close(self) -> None:
    if self._process is not None:
      self._process.kill()
      with contextlib.suppress(OSError):  # It no longer reads the rest.
        self._process.communicate()
      self._process = None


def _job(
    template: str,
    conversations: Sequence[Sequence[Message]],
    variables: dict[str, Any],
    add_generation_prompt: bool,
) -> bytes:
  """Returns the line that the process reads."""
  job = {
      'template': template,
      'conversations': [list(c) for c in conversations],
      'variables': {
          'tools': None,
          'documents': None,
          **variables,
          'add_generation_prompt': add_generation_prompt,
      },
      'date': _DATE,
      'max_chars': _MAX_CHARS,
      'memory_bytes': _MEMORY_BYTES,
  }
  return json.dumps(job).encode() + b'\n'


def _texts(line: bytes) -> list[str]:
  """Returns what the process wrote."""
  answer = json.loads(line)
  if 'error' in answer:
    raise ValueError(f'the chat template failed: {answer["error"]}')
  return answer['texts']


def _late(seconds: float, count: int) -> ValueError:
  return ValueError(
      f'the chat template did not finish within {seconds:.1f} s for {count}'
      ' prompts; use a template that ends, or a plain one.'
  )


def _ended(status: int, said: bytes) -> ValueError:
  return ValueError(
      f'the chat template ended its process (exit status {status}; memory limit'
      f' {_MEMORY_BYTES >> 20} MiB): {said.decode(errors="replace")[-300:]}'
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFormat:
  """The tokenizer's own chat template, opened for the assistant's answer.

  Attributes:
    system: system message put before a conversation that has none; '' leaves
      the template's default.
    instruction: appended to the last message, e.g. how to mark the answer.
    variables: settings of the template, e.g. {'enable_thinking': False}.
  """

  system: str = ''
  instruction: str = ''
  variables: dict[str, Any] = dataclasses.field(default_factory=dict)

  # The template writes BOS itself.
  add_special_tokens = False

  def messages(self, example: Example) -> list[Message]:
    """Returns the conversation that the template will render."""
    messages = example.prompt
    if isinstance(messages, str):
      messages = [{'role': 'user', 'content': messages}]
    last = messages[-1]
    messages = [
        *messages[:-1],
        {**last, 'content': last['content'] + self.instruction},
    ]
    if self.system and messages[0]['role'] != 'system':
      messages = [{'role': 'system', 'content': self.system}, *messages]
    return messages

  def apply(
      self, examples: Sequence[Example], tokenizer: Tokenizer
  ) -> tuple[list[str], list[list[Message]]]:
    """Returns the texts to tokenise and their conversations."""
    if not tokenizer.chat_template:
      raise ValueError(
          'the tokenizer has no chat template; use a plain one, such as'
          " '{prompt}' (data.template, or --template= of evaluate)."
      )
    conversations = [self.messages(example) for example in examples]
    texts = render_chat(
        tokenizer.chat_template,
        conversations,
        variables={**tokenizer.template_variables, **self.variables},
    )
    return texts, conversations


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainFormat:
  r"""A text with one place for the prompt, for models without a chat form.

  Attributes:
    template: holds '{prompt}' once; everything else is literal, so that
      '{prompt}\nPut the answer in \boxed{}.' needs no escapes.
  """

  template: str = '{prompt}'

  # What the tokenizer puts around a text (Llama's BOS) belongs here too.
  add_special_tokens = True

  def __post_init__(self):
    if self.template.count('{prompt}') != 1:
      raise ValueError(
          f"the plain template {self.template!r} must hold '{{prompt}}' exactly"
          ' once.'
      )

  def apply(
      self, examples: Sequence[Example], tokenizer: Tokenizer
  ) -> tuple[list[str], list[str]]:
    """Returns the texts to tokenise, twice: text is all there is."""
    del tokenizer  # A plain text has no special tokens of its own.
    texts = []
    for example in examples:
      if not isinstance(example.prompt, str):
        raise ValueError(
            f'prompt {example.id} ({example.source}) is a conversation, and a'
            ' plain template takes text; use the chat template, or another'
            ' prompt_key.'
        )
      texts.append(self.template.replace('{prompt}', example.prompt))
    return texts, texts


PromptFormat: TypeAlias = ChatFormat | PlainFormat
