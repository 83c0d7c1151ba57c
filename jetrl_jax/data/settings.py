"""The settings of a run's prompts."""

import dataclasses

from jetrl_jax.data.chat_template import ChatFormat, PlainFormat, PromptFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
  """From rows of files to prompts.

  Attributes:
    train_files: JSONL, JSON, Parquet, or 'hf:<repo>[:<config>]:<split>'.
    val_files: held-out prompts, in the same formats; () is no evaluation.
    prompt_key: column with the question or the list of chat messages.
    answer_key: column with the reference answer; '' where there is none. A
      GSM8K solution is cut to what follows its last '####'.
    source_key: column with the data set's name; by default the file's name.
    tokenizer: folder with tokenizer.json; by default model.path.
    template: 'chat' (the tokenizer's own template) or a text with '{prompt}'.
    instruction: for 'chat': appended to the last message.
    system: for 'chat': system message put before a conversation that has none;
      '' leaves the template's default.
    max_prompt_length: longest prompt kept, in tokens, template included.
    val_max_samples: held-out prompts used; 0 is all.
  """

  train_files: tuple[str, ...] = ()
  val_files: tuple[str, ...] = ()
  prompt_key: str = 'question'
  answer_key: str = 'answer'
  source_key: str = ''
  tokenizer: str = ''
  template: str = 'chat'
  instruction: str = ''
  system: str = ''
  max_prompt_length: int = 512
  val_max_samples: int = 0

  def __post_init__(self):
    if self.val_max_samples < 0:
      raise ValueError(
          f'data.val_max_samples is {self.val_max_samples}; allowed: 0 (all),'
          ' > 0'
      )

  @property
  def prompt_format(self) -> PromptFormat:
    """How a question becomes the text that the policy sees."""
    if self.template == 'chat':
      return ChatFormat(system=self.system, instruction=self.instruction)
    return PlainFormat(template=self.template)
