"""Lines that engines and ranks of a launch with `--log-json` write: JSON objects, which get their node and rank."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from plait_proto import UNDECODABLE

from plait.log import writes_json

Record = dict[str, Any]
"""With time, level, source and message, and what else its writer has."""

_HEAD = ("time", "level", "source", "message")
_RANK = re.compile(r"rank (\d+)")
_COMMAND = "plait"
"""The source of a command's last line, which is the message alone in text."""


def read_record(line: str) -> Record | None:
    """The object of a line; None for text, such as an engine's standard output."""
    if not writes_json() or not line.startswith("{"):
        return None
    try:
        record = msgspec.json.decode(line, type=Record)
    except UNDECODABLE:
        return None
    return record if all(isinstance(record.get(name), str) for name in _HEAD) else None


def text_of(record: Record) -> str:
    """The line without `--log-json`, but for who says it and for further fields."""
    if record["source"] == _COMMAND:
        return str(record["message"])
    return f"{record['time'].replace('T', ' ', 1)} {record['level']} {record['message']}"


def with_place(record: Record, node: int, first_rank: int) -> Record:
    """The record with its node, and the rank that says it or that it is about, counted through all nodes."""
    if found := _RANK.fullmatch(record["source"]):
        rank = first_rank + int(found[1])
        return record | {"source": f"rank {rank}", "node": node, "rank": rank}
    about = record.get("rank")
    return record | {"node": node} | ({"rank": first_rank + about} if isinstance(about, int) else {})
