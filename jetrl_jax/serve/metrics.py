"""A server's metrics for Prometheus."""

import time

import prometheus_client
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from jetrl_jax.serve.decoder import Decoder

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
  """Counters of one server.

  Args:
    decoder: its queue and slots are told.
    num_slots: the number of slots of the engine.
  """

  content_type = CONTENT_TYPE_LATEST

  def __init__(self, decoder: Decoder, num_slots: int):
    self._registry = prometheus_client.CollectorRegistry()
    own = {'registry': self._registry, 'namespace': 'jetrl_jax'}
    for name, what, value in (
        ('slots', 'Sequences that can be decoded at once.', lambda: num_slots),
        (
            'running',
            'Sequences that are being decoded.',
            lambda: decoder.num_running,
        ),
        (
            'waiting',
            'Sequences that wait for a slot.',
            lambda: decoder.num_waiting,
        ),
    ):
      prometheus_client.Gauge(name, what, **own).set_function(value)
    self._requests = prometheus_client.Counter(
        'requests', 'Requests by path and status.', ['path', 'status'], **own
    )
    self._prompt_tokens = prometheus_client.Counter(
        'prompt_tokens', 'Tokens of the prompts that were answered.', **own
    )
    self._sampled_tokens = prometheus_client.Counter(
        'sampled_tokens', 'Tokens that were sampled and sent.', **own
    )
    self._first = prometheus_client.Histogram(
        'time_to_first_token_seconds',
        'From the request to its first piece of text.',
        buckets=_SECONDS,
        **own,
    )
    self._whole = prometheus_client.Histogram(
        'request_seconds',
        'From the request to the end of its answer.',
        buckets=_SECONDS,
        **own,
    )

  def text(self) -> bytes:
    """Returns all of them in Prometheus' text format."""
    return prometheus_client.generate_latest(self._registry)

  def count(self, path: str, status: int) -> None:
    """Counts a request."""
    self._requests.labels(path, str(status)).inc()

  def first_piece(self, start: float) -> None:
    """Notes that text of a request has come; `start` is monotonic seconds."""
    self._first.observe(time.monotonic() - start)

  def done(self, start: float, prompt_tokens: int, sampled: int) -> None:
    """Notes the end of an answer."""
    self._whole.observe(time.monotonic() - start)
    self._prompt_tokens.inc(prompt_tokens)
    self._sampled_tokens.inc(sampled)
