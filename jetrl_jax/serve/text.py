"""Text of a response while its tokens arrive."""

from collections.abc import Sequence

from jetrl_jax.data import Tokenizer

_UNFINISHED = '\ufffd'


class TextStream:
  """Turns tokens into text that never has to be taken back.

  A character may be spread over several tokens, and what a token means may
  depend on the one before it (a leading space). So the text of a token is what
  it adds to that of the tokens just before it, and text that ends in half a
  character waits for the rest. All pieces joined are the text of all tokens.

  Args:
    tokenizer: the tokenizer of the policy.
  """

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._tokens: list[int] = []
    # Text up to `_done` has been handed out; it was decoded from `_start` on.
    self._start = self._done = 0

  def push(self, tokens: Sequence[int]) -> str:
    """Returns the text that these tokens complete; '' when none does."""
    self._tokens += tokens
    text = self._new_text()
    if text.endswith(_UNFINISHED):
      return ''
    if text:
      self._start, self._done = self._done, len(self._tokens)
    return text

  def flush(self) -> str:
    """Returns the rest of the text; half a character becomes U+FFFD."""
    text = self._new_text()
    self._start = self._done = len(self._tokens)
    return text

  def _new_text(self) -> str:
    before = self._tokenizer.decode(self._tokens[self._start : self._done])
    after = self._tokenizer.decode(self._tokens[self._start :])
    return after[len(before) :]


class StoppedText:
  """A response's text up to its first stop string, while tokens arrive.

  Text that may be the beginning of a stop string waits for the next tokens.

  Args:
    tokenizer: the tokenizer of the policy.
    stop: strings that end the text; they are not part of it.

  Attributes:
    stopped: whether one was found. The token that completed it is the last one
      that was pushed.
  """

  def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
    self._stream, self._stop = TextStream(tokenizer), tuple(stop)
    self._held = ''
    self.stopped = False

  def push(self, token: int) -> str:
    """Returns the text that this token lets go."""
    return self._release(self._stream.push([token]))

  def flush(self) -> str:
    """Returns the text that still waited when the response ended."""
    text = self._release(self._stream.flush())
    rest, self._held = self._held, ''
    return text + rest

  def _release(self, new: str) -> str:
    text = self._held + new
    found = [at for string in self._stop if (at := text.find(string)) >= 0]
    if found:
      self.stopped, self._held = True, ''
      return text[: min(found)]
    keep = max((_overlap(text, string) for string in self._stop), default=0)
    self._held = text[len(text) - keep :]
    return text[: len(text) - keep]


def _overlap(text: str, string: str) -> int:
  """Returns how many characters at the end of a text begin a string."""
  most = min(len(text), len(string) - 1)
  return next((n for n in range(most, 0, -1) if text.endswith(string[:n])), 0)


def token_text(tokenizer: Tokenizer, token: int) -> str:
  r"""Returns a token as text of its own.

  One that is no whole character is written as OpenAI's API does, as in
  'bytes:\xe2\x82', so that different tokens have different texts.
  """
  found = tokenizer.token_bytes(token)
  try:
    return found.decode()
  except UnicodeDecodeError:
    return 'bytes:' + ''.join(f'\\x{byte:02x}' for byte in found)
