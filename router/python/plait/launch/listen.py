"""The listening socket. It is opened before anything heavy is loaded."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping

from plait.errors import SettingsError

BACKLOG = 2048
UNIX = "unix:"
"""Begins the ready line's address of such a socket; its absolute path follows."""
FIRST_FD = 3
"""The file descriptor of the first socket that systemd hands over (sd_listen_fds)."""


def listen(host: str, port: int, *, has_keys: bool, flags: str = "--") -> socket.socket:
    """A socket that listens on `host` and `port` (0: a free one). `flags` begins the names of their settings.

    Raises `SettingsError` if the port is taken or the host unknown. Without keys only loopback is allowed: anyone in
    the network could use the server.
    """
    family, address = _resolve(host, port, flags)
    key_flag = "--api-key-file" if flags == "--" else f"{flags}key-file"
    _require_keys(f"{flags}host is {host!r}", address[0], has_keys, key_flag)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SettingsError(_why_not(host, port, error, flags)) from error
    listener.setblocking(False)
    return listener


def is_handed_over(environment: Mapping[str, str]) -> bool:
    """Whether systemd hands sockets to this process."""
    return environment.get("LISTEN_PID") == str(os.getpid())


def handed_over(
    environment: MutableMapping[str, str], *, has_keys: bool, first_fd: int = FIRST_FD
) -> socket.socket | None:
    """The socket of a `plait.socket` that systemd listens on; None if it handed none to this process.

    Its variables leave `environment`. Raises `SettingsError` if it is no TCP socket, not the only one, or open to other
    machines without keys.
    """
    if not is_handed_over(environment):
        return None
    _, num, _ = (environment.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if num != "1":
        raise SettingsError(f"systemd hands over {num or 'no'} sockets, plait serve takes one; give one ListenStream=")
    listener = socket.socket(fileno=first_fd)
    try:
        if listener.family not in (socket.AF_INET, socket.AF_INET6) or listener.type != socket.SOCK_STREAM:
            raise SettingsError("the socket that systemd hands over is not TCP; give ListenStream= a port")
        host, port = listener.getsockname()[:2]
        _require_keys(f"systemd listens on {host} port {port}", host, has_keys)
    except SettingsError:
        listener.close()
        raise
    listener.set_inheritable(False)
    listener.setblocking(False)
    return listener


def _require_keys(given: str, address: str, has_keys: bool, key_flag: str = "--api-key-file") -> None:
    if not has_keys and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise SettingsError(
            f"{given}, which other machines can reach, and there is no {key_flag}; "
            "give a key file, or listen on 127.0.0.1"
        )


def url(listener: socket.socket, *, has_tls: bool = False) -> str:
    """The URL for clients on this machine."""
    if listener.family == socket.AF_UNIX:
        return f"{UNIX}{listener.getsockname()}"
    scheme = "https" if has_tls else "http"
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _resolve(host: str, port: int, flags: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"{flags}host is {host!r}, which is not an address of this machine: {error}") from error
    family, _, _, _, address = found[0]
    return family, (str(address[0]), port)


def _why_not(host: str, port: int, error: OSError, flags: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; choose another with {flags}port, or {flags}port 0 for a free one"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} needs privileges; choose one over 1023 with {flags}port"
    return f"cannot listen on {host} port {port}: {error.strerror}; check {flags}host and {flags}port"
