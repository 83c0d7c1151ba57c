"""Renders a chat template in a process of its own; run as a script.

Reads JSON objects on standard input, a line each ({template, conversations,
variables, date, max_chars, memory_bytes}), and writes a line for each on
standard output: {texts} or {error}. It imports nothing of ours, so that it
starts fast and holds nothing worth stealing. The caller ends it when it runs
too long.

The environment is the one chat templates are written for: an immutable
sandbox with trimmed blocks, `{% break %}`, `{% generation %}`, `tojson` without
HTML escapes, `raise_exception` and `strftime_now`.
"""

import datetime
import json
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

try:
  import resource
# Windows has no such limit. There only the time limit bounds a template.
except ImportError:
  resource = None


class _Generation(jinja2.ext.Extension):
  """`{% generation %}...{% endgeneration %}` renders what it encloses."""

  tags = {'generation'}

  def parse(self, parser):
    """Replaces the block by its body."""
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, **_):
  return json.dumps(
      value, ensure_ascii=ensure_ascii, indent=indent, separators=separators
  )


def _raise_exception(message):
  raise jinja2.exceptions.TemplateError(message)


def render(job: dict) -> list[str]:
  """Renders every conversation of `job`; raises what the template raises."""
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=[jinja2.ext.loopcontrols, _Generation],
  )
  date = datetime.date.fromisoformat(job['date'])
  environment.filters['tojson'] = _tojson
  environment.globals['raise_exception'] = _raise_exception
  environment.globals['strftime_now'] = date.strftime
  template = environment.from_string(job['template'])
  texts = []
  for messages in job['conversations']:
    pieces = []
    size = 0
    for piece in template.generate(messages=messages, **job['variables']):
      size += len(piece)
      if size > job['max_chars']:
        raise ValueError(
            f'the text of one prompt passes {job["max_chars"]} characters'
        )
      pieces.append(piece)
    texts.append(''.join(pieces))
  return texts


def main() -> None:
  """Reads each job, limits the process, answers."""
  for line in sys.stdin:
    job = json.loads(line)
    if resource is not None:
      limit = job['memory_bytes']
      resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
      answer = {'texts': render(job)}
    except Exception as error:
      answer = {'error': f'{type(error).__name__}: {error}'[:1000]}
    # In pieces, because the whole would count as memory of a template.
    json.dump(answer, sys.stdout)
    print(flush=True)


if __name__ == '__main__':
  main()
