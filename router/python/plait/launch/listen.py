"""The listening socket. It is opened before anything heavy is loaded."""

from __future__ import annotations

import errno
import ipaddress
import socket

from plait.errors import SettingsError

BACKLOG = 2048


def listen(host: str, port: int, *, has_keys: bool) -> socket.socket:
    """A socket that listens on `host` and `port` (0: a free one).

    Raises `SettingsError` if the port is taken or the host unknown. Without keys only loopback is allowed: anyone in
    the network could use the server.
    """
    family, address = _resolve(host, port)
    if not has_keys and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        raise SettingsError(
            f"--host is {host!r}, which other machines can reach, and there is no --api-key-file; "
            "give a key file, or listen on 127.0.0.1"
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SettingsError(_why_not(host, port, error)) from error
    listener.setblocking(False)
    return listener


def url(listener: socket.socket) -> str:
    """The URL for clients on this machine."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"--host is {host!r}, which is not an address of this machine: {error}") from error
    family, _, _, _, address = found[0]
    return family, (str(address[0]), port)


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; choose another with --port, or --port 0 for a free one"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} needs privileges; choose one over 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror}; check --host and --port"
