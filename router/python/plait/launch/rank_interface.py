"""The network interface over which ranks exchange rows: gloo and NCCL take its name from the environment."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import MutableMapping
from pathlib import Path

from plait.errors import SettingsError
from plait.settings import GroupMembership

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Where the user may name another one."""
_LOOPBACK = "lo"
"""Ranks of a machine talk only to each other; gloo's default is the host name's address, NCCL's any but loopback."""
_SIOCGIFADDR = 0x8915


def set_rank_interface(
    environment: MutableMapping[str, str],
    group: GroupMembership | None,
    *,
    shares_experts: bool,
    rank_endpoint: str | None = None,
) -> None:
    """Name it in the environment of the ranks, unless the user has. Raises `SettingsError` if it cannot be found.

    Engines whose ranks compute together over TCP take the interface from which the group's address is reached, an
    engine with ranks on other hosts that of `rank_endpoint`.
    """
    if all(name in environment for name in VARIABLES):
        return
    endpoint = rank_endpoint
    if shares_experts and group is not None and group.endpoint.startswith("tcp://"):
        endpoint = group.endpoint
    found = interface_to(endpoint) if endpoint is not None else _LOOPBACK
    for name in VARIABLES:
        environment.setdefault(name, found)


def interface_to(endpoint: str) -> str:
    """The interface from which a `tcp://HOST:PORT` is reached, or that has this address itself."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    names = [name for _, name in socket.if_nameindex()]
    if host in names:
        return host
    try:
        own = _address_towards(host)
    except OSError as error:
        raise SettingsError(f"{endpoint} cannot be reached: {error}; {_advice()}") from error
    found = next((name for name in names if own in _addresses(name)), None)
    if found is None:
        raise SettingsError(f"no network interface is known to have the address {own}, towards {endpoint}; {_advice()}")
    return found


def _address_towards(host: str) -> str:
    if host in ("*", "0.0.0.0", "::"):
        raise OSError("it names no address of this host")
    family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _addresses(name: str) -> set[str]:
    """Of an interface; of several IPv4 addresses the first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            found = {socket.inet_ntoa(answer[20:24])}
        except OSError:  # it has none
            found = set()
    listed = Path("/proc/net/if_inet6")
    lines = [line.split() for line in listed.read_text().splitlines()] if listed.is_file() else []
    return found | {str(ipaddress.IPv6Address(bytes.fromhex(line[0]))) for line in lines if line[5] == name}


def _advice() -> str:
    return f"name the interface over which the ranks exchange rows: set {' and '.join(VARIABLES)}"
