"""Who is missing: each of several processes looks after the others.

A watch in every process tells the others once a second that it lives and what
it does. If a process dies, is stopped or fails, the others say which one and
end, so that the launcher can start all of them again.
"""

import contextlib
import json
import logging as std_logging
import os
import sys
import threading
import time
from typing import Protocol

import jax
from absl import logging

from jetrl_jax.core import interrupt

# Seconds without a sign of life after which a process counts as lost.
SILENT_S = 25.0
# Seconds that a process may do nothing while another one waits for it.
STALLED_S = 60.0

_BEAT_S = 1.0


class Store(Protocol):
  """The processes of a run, and what they write for each other to read.

  Attributes:
    rank: this process, from 0.
    count: number of processes.
  """

  rank: int
  count: int

  def set(self, key: str, value: bytes, *, again: bool = False) -> None:
    """Writes a value; `again` says that there may be an earlier one."""
    ...

  def folder(self, key: str) -> dict[str, bytes]:
    """Returns all values below a key, by the last part of theirs."""
    ...

  def delete(self, key: str) -> None:
    """Deletes a value, or all below a key."""
    ...


class Watch:
  """Tells the others that this process lives, and looks after them.

  Args:
    group: where to read and write.

  Attributes:
    where: what this process is at, for messages.
    patience: above 0 while it may take minutes without progress.
    armed: whether a process that makes no progress counts as hanging.
  """

  def __init__(self, group: Store):
    self._group = group
    self.where, self._progress = 'start-up', 0
    self.patience = 0
    self.armed = False
    self._touched = time.monotonic()
    self._longest = 0.0
    # For each process: its last record, and when it and its progress changed.
    self._records: dict[int, dict] = {}
    self._heard: dict[int, float] = {}
    self._moved: dict[int, float] = {}
    self._answered = time.monotonic()
    self._stopping = threading.Event()
    self._main = threading.main_thread().ident
    self._told_stop = False
    self._sent = 0
    self._warnings: list[str] = []
    self._said: set[str] = set()
    self._held: list[tuple[float, int, str]] = []
    self._lock = threading.Lock()
    self._ending = False
    self._threads: list[threading.Thread] = []

  # --- called by the main thread

  def start(self) -> None:
    """Starts the threads."""
    now = time.monotonic()
    for other in range(self._group.count):
      self._heard[other] = self._moved[other] = now
    logging.get_absl_logger().addHandler(_Collector(self))
    self._threads = [
        threading.Thread(target=self._beat, daemon=True, name='beat'),
        threading.Thread(target=self._judge, daemon=True, name='judge'),
    ]
    for thread in self._threads:
      thread.start()

  def stop(self) -> None:
    """Ends the threads; process 0 prints what the others still warn of."""
    self._stopping.set()
    # Python ends a thread that is inside a call to the store at its own end
    # by an exception through C++ code, which aborts the process.
    for thread in self._threads:
      thread.join(SILENT_S)
    if self._group.rank == 0:
      self._take_warnings()
      self._print_warnings(0.0)

  def touch(self, where: str | None = None) -> None:
    """Notes that this process makes progress, and at what."""
    now = time.monotonic()
    if self.armed and not self.patience:
      self._longest = max(self._longest, now - self._touched)
    self._touched = now
    self._progress += 1
    if where is not None:
      self.where = where

  def waits(self) -> None:
    """Notes that this process waits for another one, which is looked after.

    However long that takes: it is no progress, and no pause of its own.
    """
    self._touched = time.monotonic()

  def stalled(self, other: int, since: float) -> str | None:
    """Returns what another process is at if it does nothing, else None."""
    record = self._records.get(other)
    if record is None:
      return None
    idle = time.monotonic() - max(since, self._moved[other])
    return record['where'] if idle > STALLED_S else None

  def warned(self, text: str) -> None:
    """Notes a warning of this process."""
    with self._lock:
      if self._group.rank == 0:
        self._said.add(text)
      else:
        self._warnings.append(text)

  def fail(self, why: str) -> None:
    """Tells the others why this process ends, and ends it."""
    with contextlib.suppress(Exception):
      self._group.set(f'failed/{self._group.rank}', why.encode())
    self._end(f'error: {why}')

  # --- the threads

  def _beat(self) -> None:
    """Exchanges signs of life with the others through the store."""
    group, number = self._group, 0
    while not self._stopping.wait(_BEAT_S if number else 0):
      number += 1
      try:
        record = {
            'beat': number,
            'where': self.where,
            'progress': self._progress,
            'busy': self._is_busy(),
        }
        group.set(f'beat/{group.rank}', json.dumps(record).encode(), again=True)
        self._read(group.folder('beat'))
        self._pass_on_stop(group)
        self._pass_on_warnings(group)
        for other, why in group.folder('failed').items():
          if int(other) != group.rank:
            self._end(f'process {other} of this run has ended: {why.decode()}')
        self._answered = time.monotonic()
      except jax.errors.JaxRuntimeError as error:
        if self._stopping.is_set():
          return
        logging.debug('The store does not answer: %s', error)

  def _read(self, records: dict[str, bytes]) -> None:
    now = time.monotonic()
    for other, text in records.items():
      r, record = int(other), json.loads(text)
      old = self._records.get(r, {})
      if record['beat'] != old.get('beat'):
        self._heard[r] = now
      if record['progress'] != old.get('progress'):
        self._moved[r] = now
      self._records[r] = record
    # Others may wait in a collective for whoever is busy.
    if any(record['busy'] for record in self._records.values()):
      self._moved = dict.fromkeys(self._moved, now)

  def _pass_on_stop(self, group: Store) -> None:
    if (here := interrupt.asked()) and not self._told_stop:
      self._told_stop = True
      group.set(f'stop/{group.rank}', here.encode())
    for name in group.folder('stop').values():
      interrupt.ask(name.decode())

  def _pass_on_warnings(self, group: Store) -> None:
    if group.rank:
      self.send_warnings()
      return
    self._take_warnings()
    # Not at once: process 0 may be about to say the same.
    self._print_warnings(3 * _BEAT_S)

  def send_warnings(self) -> None:
    """Sends what this process has warned of to process 0."""
    with self._lock:
      mine, self._warnings = self._warnings, []
      self._sent += bool(mine)
    if mine:
      key = f'warned/{self._group.rank}_{self._sent}'
      self._group.set(key, json.dumps(mine).encode())

  def _take_warnings(self) -> None:
    now = time.monotonic()
    for name, texts in self._group.folder('warned').items():
      self._group.delete(f'warned/{name}')
      with self._lock:
        self._held += [
            (now, int(name.partition('_')[0]), text)
            for text in json.loads(texts)
        ]

  def _print_warnings(self, age: float) -> None:
    """Says once what other processes warn of, and this one does not."""
    now = time.monotonic()
    with self._lock:
      due = [item for item in self._held if now - item[0] >= age]
      self._held = [item for item in self._held if item not in due]
      for _, other, text in due:
        if text not in self._said:
          print(f'[process {other}] {text}', file=sys.stderr, flush=True)
        self._said.add(text)

  def _judge(self) -> None:
    """Ends this process when another one is lost."""
    last = time.monotonic()
    while not self._stopping.wait(_BEAT_S):
      now = time.monotonic()
      if now - last > 5 * _BEAT_S:
        # This process itself was stopped for a while.
        for r in self._heard:
          self._heard[r] += now - last
        self._answered += now - last
        self._touched += now - last
      last = now
      self._judge_itself(now)
      if now - self._answered > SILENT_S:
        self._end(self._lost(0, now - self._answered))
      if now - self._answered > 3 * _BEAT_S:
        continue  # Nothing was heard of anybody.
      for r, heard in self._heard.items():
        # One thread may hold up all of a process that loads or compiles.
        busy = self._records.get(r, {}).get('busy', True)
        if r != self._group.rank and now - heard > SILENT_S * (1 + busy):
          self._end(self._lost(r, now - heard))

  def _judge_itself(self, now: float) -> None:
    others = {
        r: record
        for r, record in sorted(self._records.items())
        if r != self._group.rank
    }
    # It may wait in a collective for another one that is busy.
    if self._is_busy() or any(other['busy'] for other in others.values()):
      self._touched = now
      return
    idle = now - self._touched
    if idle > max(STALLED_S, 5 * self._longest):
      where = ''.join(
          f'; process {r} is at: {other["where"]}'
          for r, other in others.items()
      )
      self.fail(
          f'process {self._group.rank} has done nothing for {idle:.0f} s, at:'
          f' {self.where}{where}'
      )

  def _lost(self, other: int, seconds: float) -> str:
    record = self._records.get(other)
    at = f'; it was at: {record["where"]}' if record else ''
    return (
        f'process {other} of this run has not been heard of for'
        f' {seconds:.0f} s{at}. Process {self._group.rank}, at:'
        f' {self.where}, ends. The same command resumes from the newest'
        ' checkpoint'
    )

  def _is_busy(self) -> bool:
    """Whether this process may do nothing that is seen for minutes."""
    return not self.armed or self.patience > 0 or self._compiles()

  def _compiles(self) -> bool:
    frame = sys._current_frames().get(self._main or 0)
    while frame is not None:
      if frame.f_code.co_name == 'backend_compile_and_load':
        return True
      frame = frame.f_back
    return False

  def _end(self, sentence: str) -> None:
    with self._lock:
      if self._ending:
        # Another thread ends the process.
        time.sleep(60)
      self._ending = True
    print(f'[process {self._group.rank}] {sentence}', file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(Exception):
        stream.flush()
    if self._group.rank == 0:
      # The store is here, and the others have yet to read why.
      time.sleep(4 * _BEAT_S)
    os._exit(1)


class _Collector(std_logging.Handler):
  """Hands warnings to the watch."""

  def __init__(self, watch: Watch):
    super().__init__(std_logging.WARNING)
    self._watch = watch

  def emit(self, record: std_logging.LogRecord) -> None:
    with contextlib.suppress(Exception):
      self._watch.warned(record.getMessage())
