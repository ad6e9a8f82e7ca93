"""The lines of an OpenAI batch file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from plait.errors import SettingsError
from plait.http.connection_limits import MAX_BODY_BYTES
from plait.offline.calls import READERS

MAX_LINE_BYTES = MAX_BODY_BYTES + 65_536
"""A body over HTTP, and what is around it."""
MAX_ID_CHARACTERS = 512


class BatchRequest(NamedTuple):
    """A line that can be asked."""

    number: int
    """Of the line, from 1."""
    custom_id: str
    url: str
    body: bytes


class BrokenLine(NamedTuple):
    """A line that cannot."""

    number: int
    custom_id: str | None
    code: str
    message: str


Line = BatchRequest | BrokenLine


class _Asked(msgspec.Struct):
    custom_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARACTERS)]
    url: str
    body: msgspec.Raw
    method: str = "POST"


class BatchFile:
    """A batch file, read twice: once to count and to know the ids, then line by line. Blank lines do not count."""

    def __init__(self, path: Path) -> None:
        """Raises `SettingsError` for a file that cannot be read."""
        if not path.is_file():
            raise SettingsError(f"IN is {str(path)!r}, which is no file; give a batch file, one JSON object a line")
        self._path = path
        self._first_lines: dict[str, int] = {}
        self.broken: set[int] = set()
        """Numbers of the lines that cannot be asked."""
        for line in self.lines():
            if isinstance(line, BrokenLine):
                self.broken.add(line.number)

    def __len__(self) -> int:
        """Lines."""
        return len(self._first_lines) + len(self.broken)

    def __contains__(self, custom_id: str) -> bool:
        """Whether a line with this id can be asked."""
        return custom_id in self._first_lines

    def lines(self) -> Iterator[Line]:
        """All lines in order, each checked. Of two with one id, the later one is broken."""
        for number, raw in _read(self._path):
            line = _parse(number, raw)
            if isinstance(line, BatchRequest):
                first = self._first_lines.setdefault(line.custom_id, number)
                if first != number:
                    message = f"line {number} has the `custom_id` {line.custom_id!r} of line {first}; give each its own"
                    line = BrokenLine(number, line.custom_id, "duplicate_custom_id", message)
            yield line


def _read(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """The lines that are not blank, with their numbers; None for one that is too long."""
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                is_whole = len(raw) <= MAX_LINE_BYTES
                while not raw.endswith(b"\n") and (more := file.readline(MAX_LINE_BYTES)):
                    raw = more
                if not is_whole or raw.strip():
                    yield number, raw if is_whole else None
    except OSError as error:
        raise SettingsError(f"IN {path} cannot be read: {error.strerror}") from error


def _parse(number: int, raw: bytes | None) -> Line:
    def broken(code: str, message: str, custom_id: str | None = None) -> BrokenLine:
        return BrokenLine(number, custom_id, code, f"line {number} {message}")

    if raw is None:
        return broken("line_too_long", f"has over {MAX_LINE_BYTES} bytes, which is the limit; shorten the prompt")
    try:
        asked = msgspec.json.decode(raw, type=_Asked)
    except msgspec.ValidationError as error:
        return broken("invalid_line", f"is no request: {error}; send `custom_id`, `method`, `url` and `body`")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return broken("invalid_json_line", f"is not valid JSON: {error}; write one object a line")
    if asked.method != "POST":
        return broken("invalid_method", f"has `method` {asked.method!r:.80}; only POST is allowed", asked.custom_id)
    if asked.url not in READERS:
        urls = ", ".join(READERS)
        return broken("invalid_url", f"has `url` {asked.url!r:.80}; allowed: {urls}", asked.custom_id)
    return BatchRequest(number, asked.custom_id, asked.url, bytes(asked.body))
