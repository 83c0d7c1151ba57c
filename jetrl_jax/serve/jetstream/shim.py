"""Imports google-jetstream 0.2.2, and mends what keeps it from running here.

0.2.2 (May 2024) is the last version that was published. What is mended:

1. `orchestrator.delete_pytree` calls `jax.tree_map`, which JAX has removed. The
   orchestrator answers any exception in a thread by killing its process, so
   the first request would be the last. The function is replaced by one that
   calls `jax.tree.map`.
2. Importing its engine API imports seqio, for SentencePiece vocabularies, and
   tiktoken; seqio imports TensorFlow, which takes seconds and is a second
   library that wants the GPU. Both tokenizers stay unused here, so empty
   classes stand in for them during the import, and only then. The package
   works without seqio, tiktoken and TensorFlow being installed at all.
3. The thread that generates asserts that a slot is in use, which it has seen a
   few lines before. When the last request ends in between, the assertion fails
   and takes the process with it. That file is compiled without assertions; the
   step that follows decodes no request and does no harm.
4. Importing the orchestrator sets the root logger to DEBUG and adds a handler
   that writes each decode step to stdout. Both are taken back.

The other files import JetStream's modules from here; only the client takes the
two protocol files as they are, which need none of this.
"""

import contextlib
import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax

_PROTOCOL = 'jetstream.core.proto.jetstream'
_STAND_INS = {
    'seqio': (),
    'seqio.vocabularies': ('SentencePieceVocabulary', 'Vocabulary'),
    'tiktoken': ('Encoding',),
    'tiktoken.load': ('load_tiktoken_bpe',),
}


@contextlib.contextmanager
def _without_its_tokenizers() -> Iterator[None]:
  """Lets empty classes stand in for seqio and tiktoken inside."""
  made = {}
  for name, members in _STAND_INS.items():
    if name in sys.modules:
      continue  # Somebody uses the real one.
    module: Any = types.ModuleType(name)
    for member in members:
      setattr(module, member, type(member, (), {}))
    made[name] = module
  sys.modules.update(made)
  try:
    yield
  finally:
    for name in made:
      del sys.modules[name]


@contextlib.contextmanager
def _logging_as_it_was() -> Iterator[None]:
  """Undoes what is done to the root logger inside."""
  root = logging.getLogger()
  level, handlers = root.level, list(root.handlers)
  try:
    yield
  finally:
    root.setLevel(level)
    root.handlers[:] = handlers


def _import_without_assertions(name: str) -> Any:
  """Imports a module as `python -O` does."""
  spec: Any = importlib.util.find_spec(name)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  source = spec.loader.get_source(name)
  exec(compile(source, spec.origin, 'exec', optimize=1), module.__dict__)
  return module


with _without_its_tokenizers(), _logging_as_it_was():
  # By name, because the type checker's environment does not have the package.
  orchestrator = _import_without_assertions('jetstream.core.orchestrator')
  server_lib: Any = importlib.import_module('jetstream.core.server_lib')
  jetstream_pb2: Any = importlib.import_module(f'{_PROTOCOL}_pb2')
  jetstream_pb2_grpc: Any = importlib.import_module(f'{_PROTOCOL}_pb2_grpc')
  engine_api: Any = importlib.import_module('jetstream.engine.engine_api')
  token_utils: Any = importlib.import_module('jetstream.engine.token_utils')
  tokenizer_api: Any = importlib.import_module('jetstream.engine.tokenizer_api')
  tokenizer_pb2: Any = importlib.import_module('jetstream.engine.tokenizer_pb2')


def _delete_pytree(tree: Any) -> None:
  """Frees the arrays of a prefix that was inserted."""
  for leaf in jax.tree.leaves(tree):
    if isinstance(leaf, jax.Array):
      leaf.delete()


orchestrator.delete_pytree = _delete_pytree

__all__ = [
    'engine_api',
    'jetstream_pb2',
    'jetstream_pb2_grpc',
    'orchestrator',
    'server_lib',
    'token_utils',
    'tokenizer_api',
    'tokenizer_pb2',
]
