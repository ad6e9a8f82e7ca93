"""Ranks on other hosts, from the command line: where they connect, with which keys, and how many are on each."""

from __future__ import annotations

from pathlib import Path

from plait.errors import SettingsError
from plait.launch.group_place import read_key_lines
from plait.settings import HostSettings, RemoteHost, RemoteWorkers, ServeSettings

AWAITED = "Ranks of other hosts are awaited with "
"""`plait launch` reads the path of the workers' configuration after these words."""


def num_own_ranks(settings: ServeSettings) -> int:
    """Ranks on each host. Raises `SettingsError` if they cannot be divided evenly."""
    num_ranks, num_hosts = settings.process.tp * settings.process.dp, settings.hosts.rank_hosts
    if num_ranks % num_hosts:
        raise SettingsError(
            f"--rank-hosts is {num_hosts}; each host takes equally many of the {num_ranks} ranks (--tp times --dp)"
        )
    return num_ranks // num_hosts


def remote_workers(settings: ServeSettings) -> RemoteWorkers | None:
    """The ranks of other hosts; None if all are here.

    Raises `SettingsError` for flags that do not fit together, and for keys that cannot be read.
    """
    hosts = settings.hosts
    if hosts.rank_hosts == 1:
        _check_unused(hosts)
        return None
    if settings.group.group_engines > 1 or settings.process.dp_attention:
        raise SettingsError(
            "--rank-hosts is for an engine of its own, without --group-engines and --dp-attention; leave one out"
        )
    if hosts.rank_endpoint is None or hosts.rank_secret_key_file is None or hosts.rank_public_keys_file is None:
        raise SettingsError(
            "--rank-hosts needs --rank-endpoint, --rank-secret-key-file and --rank-public-keys-file; give all three"
        )
    (secret,) = read_key_lines("--rank-secret-key-file", Path(hosts.rank_secret_key_file), 1, is_secret=True)
    public = read_key_lines("--rank-public-keys-file", Path(hosts.rank_public_keys_file), hosts.rank_hosts)
    num_own = num_own_ranks(settings)
    return RemoteWorkers(
        endpoints=tuple(rank_endpoints(hosts.rank_endpoint, settings.process.dp)),
        secret=secret,
        allowed=tuple(
            RemoteHost(public=key, ranks=tuple(range(host * num_own, (host + 1) * num_own)))
            for host, key in enumerate(public)
            if host > 0
        ),
    )


def rank_endpoints(endpoint: str, num_replicas: int) -> list[str]:
    """The address of each replica. Raises `SettingsError` if the first is none."""
    address, colon, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not colon or not port.isdecimal() or int(port) + num_replicas > 65_536:
        raise SettingsError(
            f"--rank-endpoint is {endpoint!r}; give tcp://HOST:PORT, with a port a replica up to 65535 from there"
        )
    return [f"{address}:{int(port) + replica}" for replica in range(num_replicas)]


def _check_unused(hosts: HostSettings) -> None:
    given = {
        "--rank-endpoint": hosts.rank_endpoint,
        "--rank-secret-key-file": hosts.rank_secret_key_file,
        "--rank-public-keys-file": hosts.rank_public_keys_file,
    }
    if unused := next((flag for flag, value in given.items() if value is not None), None):
        raise SettingsError(f"{unused} needs --rank-hosts: say on how many hosts the ranks are")
