"""The file of a batch's results, which is also what a run after a kill goes on from.

A line is written with one call, so a kill leaves at most a torn last line. That one is cut off and asked again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec
from plait_proto import UNDECODABLE, ExitCode

from plait.errors import SettingsError, StartError
from plait.offline.batch_input import BatchFile, BatchRequest, BrokenLine
from plait.offline.calls import Answer

BEGIN = b'{"id":"batch_req_'
"""Of each line."""
_CHUNK_BYTES = 1 << 20


class Response(msgspec.Struct, kw_only=True):
    """What HTTP would have answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, kw_only=True):
    """Why a line was not asked."""

    code: str
    message: str
    line: int


class ResultLine(msgspec.Struct, kw_only=True):
    """One line of the results."""

    id: str
    custom_id: str | None
    response: Response | None
    error: LineError | None


class _Named(msgspec.Struct):
    id: str = ""


class ResultFile:
    """Results that are written one by one; nobody else may write them. Raises `SettingsError` for a strange file."""

    def __init__(self, path: Path, batch: BatchFile) -> None:
        self._path = path
        self.num_refused = 0
        """Lines of this run whose status is not 200."""
        self._answered: set[str] = set()
        self._reported: set[int] = set()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise SettingsError(f"OUT {path} cannot be written: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise SettingsError(f"OUT {path} is no file; name one, which a later run can read")
            self._lock()
            self._resume(batch)
        except BaseException:
            os.close(self._file)
            raise

    def __len__(self) -> int:
        """Lines that are there."""
        return len(self._answered) + len(self._reported)

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # a pipe
            os.fsync(self._file)
        os.close(self._file)

    def has(self, line: BatchRequest | BrokenLine) -> bool:
        """Whether its result is there."""
        if isinstance(line, BrokenLine):
            return line.number in self._reported
        return line.custom_id in self._answered

    def answer(self, request: BatchRequest, answer: Answer) -> None:
        """Add what a request was answered. Raises `StartError` if it cannot be written."""
        named = msgspec.json.decode(answer.body, type=_Named)
        response = Response(status_code=answer.status, request_id=named.id, body=msgspec.Raw(answer.body))
        self.num_refused += answer.status != 200
        self._write(ResultLine(id=_new_id(), custom_id=request.custom_id, response=response, error=None))
        self._answered.add(request.custom_id)

    def report(self, line: BrokenLine) -> None:
        """Add why a line was not asked."""
        error = LineError(code=line.code, message=line.message, line=line.number)
        self._write(ResultLine(id=_new_id(), custom_id=line.custom_id, response=None, error=error))
        self._reported.add(line.number)

    def _write(self, line: ResultLine) -> None:
        rest = memoryview(msgspec.json.encode(line) + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            message = f"OUT {self._path} cannot be written: {error.strerror}; make room and run the same command again"
            raise StartError(message, ExitCode.HARDWARE) from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"OUT {self._path} is being written by another run; wait for it, or stop it") from None

    def _resume(self, batch: BatchFile) -> None:
        """Read what is there, and cut off a torn last line."""
        begin = 0
        for number, raw in enumerate(self._lines(), 1):
            if not raw.endswith(b"\n"):
                if raw[: len(BEGIN)] != BEGIN[: len(raw)]:
                    raise self._strange(number)
                os.ftruncate(self._file, begin)
                return
            begin += len(raw)
            try:
                line = msgspec.json.decode(raw, type=ResultLine)
            except UNDECODABLE:
                raise self._strange(number) from None
            self._take(number, line, batch)

    def _take(self, number: int, line: ResultLine, batch: BatchFile) -> None:
        if line.error is not None and line.error.line in batch.broken:
            self._reported.add(line.error.line)
        elif line.error is None and line.custom_id is not None and line.custom_id in batch:
            self._answered.add(line.custom_id)
        else:
            asked = f"line {line.error.line}" if line.error is not None else repr(line.custom_id)
            raise SettingsError(
                f"OUT {self._path} has on line {number} a result for {asked}, which IN does not have so; "
                "name the file that it goes on from, or a new one"
            )

    def _lines(self) -> Iterator[bytes]:
        rest, offset = b"", 0
        while chunk := os.pread(self._file, _CHUNK_BYTES, offset):
            offset += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line + b"\n" for line in lines)
        if rest:
            yield rest

    def _strange(self, number: int) -> SettingsError:
        return SettingsError(f"OUT {self._path} has on line {number} no result of a batch; name another file")


def _new_id() -> str:
    return f"batch_req_{os.urandom(12).hex()}"
