"""The process's log lines on standard error: text or, with `--log-json`, one JSON object a line."""

from __future__ import annotations

import contextlib
import logging
import re
import select
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from plait.output import forward_to_stderr, say

if TYPE_CHECKING:
    from types import TracebackType

Field = str | int | float | None
"""None: there is no value."""

_MAX_UNENDED_BYTES = 65_536
_OF_RANK = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ([A-Z]+) rank \d+: ")
_NO_FIELDS: Mapping[str, Field] = {}
_writes_json = False
_fields_of_all: dict[str, Field] = {}


def write_json_lines(on: bool) -> None:
    """Write JSON lines from now on, or text again; of Python's own log, warnings and tracebacks too."""
    global _writes_json
    if on == _writes_json:
        return
    _writes_json = on
    _fields_of_all.clear()
    root = logging.getLogger()
    logging.captureWarnings(on)
    if on:
        root.addHandler(_JSON)
        sys.excepthook, threading.excepthook, sys.unraisablehook = _uncaught, _uncaught_in_thread, _unraisable
    else:
        root.removeHandler(_JSON)
        sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
        sys.unraisablehook = sys.__unraisablehook__


def writes_json() -> bool:
    return _writes_json


def add_to_json_lines(**fields: Field) -> None:
    """Let each JSON line of this process have these fields from now on."""
    _fields_of_all.update(fields)


def log(
    source: str,
    message: str,
    level: str = "INFO",
    *,
    fields: Mapping[str, Field] = _NO_FIELDS,
    text: str | None = None,
) -> None:
    """Write a line, or drop it if the reader is slow.

    `fields` follow the message as `name=value` in text. `text` is the whole line of text where it is another one.
    """
    now = datetime.now().astimezone()
    if _writes_json:
        _write(json_lines(new_record(level, source, message, now, fields)))
        return
    if text is None:
        said = " ".join([*([message] if message else []), *(f"{name}={_shown(it)}" for name, it in fields.items())])
        text = f"{now.strftime('%Y-%m-%d %H:%M:%S,%f')[:-3]} {level} {source}: {said}"
    forward_to_stderr(f"{text}\n".encode())


def say_last(line: str, level: str = "ERROR") -> None:
    """A command's last line on standard error: its reader is waited for."""
    if not _writes_json:
        say(line, sys.stderr)
        return
    for encoded in json_lines(new_record(level, "plait", line)):
        say(encoded.decode().rstrip("\n"), sys.stderr)


class RankLines:
    """Makes JSON of what a rank writes on its standard error. A line that names no level has that of the one before."""

    def __init__(self, rank: int, write: Callable[[bytes], None] = forward_to_stderr) -> None:
        """`write` gets each line of JSON."""
        self._source = f"rank {rank}"
        self._write = write
        self._level = "INFO"
        self._rest = b""

    def add(self, text: bytes) -> None:
        """Write the lines that `text` ends. Empty text is the end."""
        *lines, self._rest = (self._rest + text).split(b"\n")
        if not text or len(self._rest) > _MAX_UNENDED_BYTES:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            if line.strip():
                self.add_line(line.decode(errors="replace").rstrip())

    def add_line(self, line: str) -> None:
        """Write a whole line."""
        now = datetime.now()
        if (found := _OF_RANK.match(line)) is not None:
            with contextlib.suppress(ValueError):
                now = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f")
            self._level = found[2]
            line = line[found.end() :]
        for encoded in json_lines(new_record(self._level, self._source, line, now.astimezone())):
            self._write(encoded)


def _shown(value: Field) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _write(lines: Iterator[bytes]) -> None:
    for line in lines:
        forward_to_stderr(line)


def new_record(
    level: str, source: str, message: str, now: datetime | None = None, fields: Mapping[str, Field] = _NO_FIELDS
) -> dict[str, Field]:
    """The object of a line. Fields without a value are left out."""
    time = (now or datetime.now().astimezone()).isoformat(timespec="milliseconds")
    message = message.encode(errors="backslashreplace").decode()
    given = {name: it for name, it in fields.items() if it is not None}
    return {"time": time, "level": level, "source": source, "message": message} | _fields_of_all | given


def json_lines(record: Mapping[str, Field]) -> Iterator[bytes]:
    """A line, or several if it would be longer than what a pipe takes as a whole: none is cut or mixed with another."""
    line = msgspec.json.encode(record) + b"\n"
    message = str(record["message"])
    if len(line) <= select.PIPE_BUF or len(message) < 2:
        yield line
        return
    half = len(message) // 2
    yield from json_lines({**record, "message": message[:half]})
    yield from json_lines({**record, "message": message[half:]})


class _JsonHandler(logging.Handler):
    """For what Python's libraries log."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            log(record.name, self.format(record), record.levelname)
        except Exception:  # noqa: BLE001 (as logging's own handlers: a line that cannot be written ends nobody)
            self.handleError(record)


_JSON = _JsonHandler()


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("plait").critical("a bug ended this process", exc_info=(kind, error, trace))


def _uncaught_in_thread(ended: threading.ExceptHookArgs) -> None:
    error = ended.exc_value
    logging.getLogger("plait").error("a bug ended a thread", exc_info=error if error is not None else True)


def _unraisable(ignored: sys.UnraisableHookArgs) -> None:
    logging.getLogger("plait").error("%s: %r", ignored.err_msg or "ignored", ignored.object, exc_info=ignored.exc_value)
