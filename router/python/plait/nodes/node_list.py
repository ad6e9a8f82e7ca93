"""Slurm's short form of host names: `gpu[01-03,07],login`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from plait.errors import SettingsError

MAX_HOSTS = 4096
_ITEM = re.compile(r"[^,\[\]]*(?:\[[0-9,-]+\][^,\[\]]*)*")
_RANGE = re.compile(r"\[([0-9,-]+)\]")


def expand_node_list(short: str) -> list[str]:
    """The host names in order. Raises `SettingsError` for other text."""
    hosts: list[str] = []
    at = 0
    while at <= len(short):
        found = _ITEM.match(short, at)
        if found is None or not found.group() or (found.end() < len(short) and short[found.end()] != ","):
            raise SettingsError(f"Slurm's node list is {short!r}; it should read like node[01-03,07],other")
        hosts += _expand(found.group())
        if len(hosts) > MAX_HOSTS:
            raise SettingsError(f"Slurm's node list names over {MAX_HOSTS} hosts; give --nnodes, --node-rank, --head")
        at = found.end() + 1
    return hosts


def _expand(item: str) -> Iterator[str]:
    found = _RANGE.search(item)
    if found is None:
        yield item
        return
    for number in _numbers(found.group(1)):
        yield from _expand(item[: found.start()] + number + item[found.end() :])


def _numbers(ranges: str) -> Iterator[str]:
    """`01-03,07` as `01`, `02`, `03`, `07`."""
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first or (dash and not last.isdecimal()) or int(last or first) - int(first) > MAX_HOSTS:
            raise SettingsError(f"Slurm's node list has the range {part!r}; it should read like 01-03")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))
