"""Messages between the pool and its processes: a length, then the bytes."""

import socket
import struct

_LENGTH = struct.Struct('<Q')


def pack(message: bytes) -> bytes:
  """Returns the message as it travels."""
  return _LENGTH.pack(len(message)) + message


def receive(sock: socket.socket) -> bytes:
  """Waits for one message; EOFError when the other side is gone."""
  (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
  return _receive_exactly(sock, length)


def take(buffer: bytearray) -> bytes | None:
  """Removes the first whole message from what has arrived so far."""
  if len(buffer) < _LENGTH.size:
    return None
  (length,) = _LENGTH.unpack_from(buffer)
  end = _LENGTH.size + length
  if len(buffer) < end:
    return None
  message = bytes(buffer[_LENGTH.size : end])
  del buffer[:end]
  return message


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
  data = bytearray()
  while len(data) < size:
    piece = sock.recv(min(size - len(data), 1 << 20))
    if not piece:
      raise EOFError('the other side closed')
    data += piece
  return bytes(data)
