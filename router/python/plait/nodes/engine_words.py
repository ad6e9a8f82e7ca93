"""The command line of a node's engine, from the settings of `plait launch`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from plait.flags import Flag, flags
from plait.nodes.key_files import PUBLIC_KEYS, secret_key_file
from plait.nodes.layout import Layout, engine_port
from plait.nodes.place import with_port
from plait.nodes.settings import LaunchSettings
from plait.settings import GroupSettings, HostSettings, ServeSettings


def engine_settings_of(
    settings: LaunchSettings, layout: Layout, node: int, head_address: str, head_port: int
) -> ServeSettings:
    """What `plait serve` is given on `node`."""
    group, hosts = GroupSettings(), HostSettings()
    folder = Path(settings.nodes.keys or "").absolute()
    endpoint = engine_endpoint(head_address, head_port)
    if layout.spans_nodes:
        hosts = HostSettings(
            rank_hosts=layout.num_nodes,
            rank_endpoint=endpoint,
            rank_secret_key_file=str(secret_key_file(folder, node)),
            rank_public_keys_file=str(folder / PUBLIC_KEYS),
        )
    elif layout.num_nodes > 1:
        group = GroupSettings(
            group_engines=layout.num_nodes,
            group_engine=node,
            group_endpoint=endpoint,
            group_secret_key_file=str(secret_key_file(folder, node)),
            group_public_keys_file=str(folder / PUBLIC_KEYS),
        )
    components = {
        field.name: getattr(settings, field.name)
        for field in msgspec.structs.fields(LaunchSettings)
        if field.name != "nodes"
    }
    components["process"] = msgspec.structs.replace(settings.process, dp=layout.replicas_per_engine)
    return ServeSettings(**components, group=group, hosts=hosts)


def engine_endpoint(head_address: str, head_port: int) -> str:
    """Where the head's engine listens for other engines, or for the ranks of its first replica."""
    return f"tcp://{with_port(head_address, engine_port(head_port))}"


def engine_words(model: str | None, settings: ServeSettings) -> list[str]:
    """`serve MODEL` and the flags of all settings that differ from their defaults."""
    words = ["serve", *([model] if model is not None else [])]
    for field in msgspec.structs.fields(ServeSettings):
        component = getattr(settings, field.name)
        for flag in flags(field.type, field.default):
            value = getattr(component, flag.field)
            if value != flag.default:
                words += _words(flag, value)
    return words


def _words(flag: Flag, value: object) -> Iterator[str]:
    if flag.scalar is bool:
        yield flag.name if value else f"--no-{flag.name[2:]}"
    elif isinstance(value, tuple) and len(value) > 1:
        yield from (flag.name, *value)
    else:
        yield f"{flag.name}={value[0] if isinstance(value, tuple) else value}"
