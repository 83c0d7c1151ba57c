"""The address that a server listens on."""

import ipaddress
import socket


def listen(host: str, port: int) -> socket.socket:
  """Binds a port; nobody can connect before the server has started.

  Raises:
    ValueError: the address cannot be had.
  """
  if not host:
    raise ValueError(
        '--host is empty; give an address, such as 127.0.0.1 or 0.0.0.0'
    )
  host = host.strip('[]')
  try:
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    listener = socket.socket(family)
    try:
      listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      listener.bind((host, port))
    except BaseException:
      listener.close()
      raise
  except OSError as error:
    raise ValueError(
        f'cannot listen on {host}:{port} ({error.strerror or error}); give'
        ' another --host or --port'
    ) from error
  return listener


def is_loopback(listener: socket.socket) -> bool:
  """Whether only this machine can reach a socket."""
  return ipaddress.ip_address(listener.getsockname()[0]).is_loopback
