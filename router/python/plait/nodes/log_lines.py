"""Log lines of all nodes: named by node and rank, and equal ones collapsed; or one JSON object a line."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import IO

import msgspec

from plait.log import json_lines, log, new_record, writes_json
from plait.nodes.log_records import Record, read_record, text_of, with_place
from plait.output import forward_to_stderr

HOLD_SECONDS = 0.5
"""Time in which other nodes may say the same."""
MAX_HELD = 1000
_TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
_OF_RANK = re.compile(rf"({_TIME}[A-Z]+ )rank (\d+): ")


class Source(msgspec.Struct, frozen=True, order=True):
    """Who says a line."""

    node: int
    rank: int | None
    """Through all nodes; None: the node's engine or launcher."""


class Line(msgspec.Struct, frozen=True):
    """What somebody says."""

    source: Source
    text: str
    """Without the name of the rank."""
    record: Record | None = None
    """The object of it, if it was one."""
    level: str = "INFO"
    """Of an object that is made of the text."""


class Held(msgspec.Struct):
    """A line that waits for others that say the same."""

    first: str
    since: float
    sources: list[Source]


def read_line(text: str, node: int, first_rank: int) -> Line:
    """Who says the line of `node`, whose ranks count from `first_rank`, and what."""
    if (record := read_record(text)) is not None:
        record = with_place(record, node, first_rank)
        rank = record["rank"] if record["source"].startswith("rank ") else None
        return Line(Source(node, rank), text_of(record), record)
    found = _OF_RANK.match(text)
    if found is None:
        return Line(Source(node, None), text)
    return Line(Source(node, first_rank + int(found.group(2))), found.group(1) + text[found.end() :])


class LogLines:
    """Collects lines for a moment and gives them out with the names of all who said them."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def add(self, line: Line, now: float) -> None:
        # Lines that differ in the time alone are equal.
        held = self._held.setdefault(re.sub(f"^{_TIME}", "", line.text), Held(line.text, now, []))
        held.sources.append(line.source)

    def due(self, now: float) -> Iterator[str]:
        """Lines that have waited long enough, oldest first."""
        early = len(self._held) - MAX_HELD
        for number, (key, held) in enumerate(list(self._held.items())):
            if number < early or now >= held.since + HOLD_SECONDS:
                del self._held[key]
                yield f"[{_names(held.sources)}] {held.first}{_repeats(held.sources)}"


def _names(sources: Iterable[Source]) -> str:
    """`node 0`, or `nodes 0-1 ranks 0-3`."""
    known = set(sources)
    ranks = {source.rank for source in known if source.rank is not None}
    names = _ranges("node", {source.node for source in known})
    return f"{names} {_ranges('rank', ranks)}" if ranks else names


def _ranges(noun: str, numbers: set[int]) -> str:
    """`nodes 0-2,5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {text}"


def _repeats(sources: list[Source]) -> str:
    times = max(sources.count(source) for source in set(sources))
    return f" ({times} times)" if times > 1 else ""


def encode_line(line: Line) -> Iterator[bytes]:
    """The object of a line; several if it is long, none if it is blank."""
    if line.record is not None:
        yield from json_lines(line.record)
    elif line.text:
        yield from json_lines(new_record(line.level, "plait", line.text) | {"node": line.source.node})


class LogWriter:
    """Writes lines to standard error and, if one is given, to a file. Neither may fail or block the launcher."""

    def __init__(self, file: str | None) -> None:
        """Open the file to append to it. Raises `OSError` if that fails."""
        self._file: IO[bytes] | None = open(file, "ab", buffering=0) if file is not None else None  # noqa: SIM115
        self._lines = LogLines()

    def add(self, line: Line) -> None:
        """JSON is written at once: programs that read it want each rank's own line."""
        if not writes_json():
            self._lines.add(line, time.monotonic())
            return
        for encoded in encode_line(line):
            self._write(encoded)

    def flush(self, *, all_lines: bool = False) -> None:
        """Write what is due."""
        for line in self._lines.due(float("inf") if all_lines else time.monotonic()):
            self._write(line.encode() + b"\n")

    def _write(self, line: bytes) -> None:
        forward_to_stderr(line)
        if self._file is None:
            return
        try:
            self._file.write(line)
        except OSError as error:  # a full disk must not end the server
            self._file = None
            said = f"The combined log ends here: {error.strerror}; the server runs on"
            log("plait", said, "WARNING", text=said)
