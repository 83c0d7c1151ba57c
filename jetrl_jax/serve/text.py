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
    tokenizer: of the policy.
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
    """Returns what still waited at the end: half a character is U+FFFD."""
    text = self._new_text()
    self._start = self._done = len(self._tokens)
    return text

  def _new_text(self) -> str:
    before = self._tokenizer.decode(self._tokens[self._start : self._done])
    after = self._tokenizer.decode(self._tokens[self._start :])
    return after[len(before) :]
