"""Which node of how many this is, and where the head is: flags and the job's variables together."""

from __future__ import annotations

import ipaddress
import socket
import time

import msgspec

from plait.errors import SettingsError
from plait.nodes.environment import HEAD_PORT, Environment, JobPlace, read_job
from plait.nodes.settings import NodeSettings

LAST_HEAD_PORT = 65_535 - 64
"""The ports after the head's belong to its engine: one for other engines, or one a replica for ranks of other nodes."""
RESOLVE_AGAIN_SECONDS = 1.0


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """This node's place."""

    num_nodes: int
    node: int
    head: str
    """Host name or address of node 0."""
    head_port: int
    said_by: str
    """Where the place comes from: flags, or the job's variables."""
    is_name_late: bool = False


def find_place(settings: NodeSettings, environment: Environment) -> Place:
    """The place that flags and variables give. Raises `SettingsError` where they contradict each other."""
    job = read_job(environment, settings.launcher)
    num_nodes = _agreed("--nnodes", settings.nnodes, job.num_nodes if job is not None else None, job, 1)
    if num_nodes > 1 and settings.node_rank is None and job is None:
        raise SettingsError(
            f"--nnodes is {num_nodes} without --node-rank; say which node this is: 0 to {num_nodes - 1}"
        )
    node = _agreed("--node-rank", settings.node_rank, job.node if job is not None else None, job, 0)
    if node >= num_nodes:
        raise SettingsError(f"--node-rank is {node}; --nnodes {num_nodes} has the nodes 0 to {num_nodes - 1}")
    host, port = _head(settings, job, num_nodes)
    return Place(
        num_nodes=num_nodes,
        node=node,
        head=host,
        head_port=port,
        said_by=f"{job.launcher}: {job.said_by}" if job is not None else "--nnodes, --node-rank and --head",
        is_name_late=job is not None and job.is_name_late,
    )


def _agreed(flag: str, given: int | None, said: int | None, job: JobPlace | None, default: int) -> int:
    if given is not None and said is not None and job is not None and given != said:
        raise SettingsError(
            f"{flag} is {given}, but {job.launcher} says {said} ({job.said_by}); leave the flag out, or add "
            "--launcher none"
        )
    return next((value for value in (given, said) if value is not None), default)


def _head(settings: NodeSettings, job: JobPlace | None, num_nodes: int) -> tuple[str, int]:
    default_port = job.head_port if job is not None else HEAD_PORT
    if settings.head is not None:
        return parse_head(settings.head, default_port)
    if job is not None and job.head is not None:
        return job.head, default_port
    if num_nodes == 1:
        return "127.0.0.1", default_port
    who = f"{job.launcher} does not say where node 0 runs" if job is not None else f"--nnodes is {num_nodes}"
    raise SettingsError(f"{who}; give --head HOST:PORT, the address of node 0")


def parse_head(text: str, default_port: int = HEAD_PORT) -> tuple[str, int]:
    """Host and port of `HOST`, `HOST:PORT`, `ADDRESS`, `[ADDRESS]` and `[ADDRESS]:PORT`."""
    if _is_ipv6(text):
        return text, default_port
    if text.startswith("["):
        host, end, rest = text[1:].partition("]")
        if not end or not _is_ipv6(host):
            raise SettingsError(f"--head is {text!r}; an IPv6 address in brackets reads like [fd00::1]:7450")
    else:
        host, colon, rest = text.partition(":")
        rest = colon + rest
    port = rest.removeprefix(":")
    is_port = port.isdecimal() and 1 <= int(port) <= LAST_HEAD_PORT
    if not host or (rest and not (rest.startswith(":") and is_port)):
        raise SettingsError(
            f"--head is {text!r}; give HOST, HOST:PORT or [ADDRESS]:PORT with a port from 1 to {LAST_HEAD_PORT}"
        )
    return host, int(port) if port else default_port


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text.partition("%")[0]).version == 6
    except ValueError:
        return False


def resolve_head(place: Place, seconds: float) -> str:
    """The head's address. Where DNS learns names late it is asked again for `seconds`. Raises `SettingsError`."""
    deadline = time.monotonic() + (seconds if place.is_name_late else 0.0)
    while True:
        try:
            found = socket.getaddrinfo(place.head, place.head_port, type=socket.SOCK_STREAM)
            return str(found[0][4][0])
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline:
                raise SettingsError(
                    f"the head {place.head!r} has no address here: {error}; check --head, or DNS and /etc/hosts of "
                    "this node"
                ) from error
        time.sleep(RESOLVE_AGAIN_SECONDS)


def check_head_address(place: Place, address: str) -> None:
    """Raise `SettingsError` if the head's own name is a loopback address, as in many an /etc/hosts, or none at all."""
    if place.num_nodes == 1:
        return
    found = ipaddress.ip_address(address.partition("%")[0])
    if found.is_unspecified:
        raise SettingsError(f"--head is {place.head}, which is no host's; give the address of node 0 that all reach")
    if place.head not in (address, "localhost") and found.is_loopback:
        raise SettingsError(
            f"the head's name {place.head!r} is {address} on this node, which no other node reaches; give --head with "
            "the address that the others use, or mend /etc/hosts"
        )


def own_address(settings: NodeSettings, head_address: str) -> tuple[str, str]:
    """This node's address for the others, and why it is this one. Raises `SettingsError` if there is no way."""
    if settings.node_address is not None:
        return settings.node_address, "--node-address"
    family = socket.AF_INET6 if ":" in head_address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as way:  # nothing is sent
        try:
            way.connect((head_address, 9))
        except OSError as error:
            raise SettingsError(
                f"this node has no way to the head at {head_address}: {error.strerror}; check its network, or give "
                "--node-address"
            ) from error
        return str(way.getsockname()[0]), f"this machine's address on the way to {head_address}"


def with_port(address: str, port: int | str) -> str:
    """`10.0.0.1:80`, or `[fd00::1]:80`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
