"""Datasets in files: traces of real services, prompts, and texts split into lines."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from plait.bench.lengths import MAX_LEN
from plait.bench.prompts import VerbatimPrompt, text_prompt
from plait.errors import SettingsError

MAX_FILE_BYTES = 1 << 30
MAX_LINE_CHARS = 8 << 20
MOONCAKE_BLOCK = 512
"""Prompt tokens that one of Mooncake's hash ids stands for."""
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_Length = Annotated[int, Meta(ge=0, le=MAX_LEN)]


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace."""

    stamp: float
    """Seconds on the trace's own clock."""
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()
    """Mooncake's hash ids: equal ids are equal blocks of the prompt."""


class FileRow(msgspec.Struct, frozen=True):
    """One prompt of a file; `output_len` is None if the file gives none."""

    prompt: VerbatimPrompt
    output_len: int | None


class _Mooncake(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: _Length
    output_length: _Length
    hash_ids: list[int]


class _Line(msgspec.Struct):
    prompt: str | list[Annotated[int, Meta(ge=0)]] | None = None
    messages: list[dict[str, object]] | None = None
    output_len: Annotated[int, Meta(ge=1, le=MAX_LEN)] | None = None


def read_trace(path: Path, num: int) -> list[TraceRow]:
    """The first `num` rows of an Azure CSV or a Mooncake JSONL, by time.

    Raises `SettingsError` that names file and line if one is malformed.
    """
    readers = {".csv": _azure, ".jsonl": _mooncake}
    if path.suffix not in readers:
        raise SettingsError(
            f"--trace {path} ends with {path.suffix!r}; allowed: .csv (Azure's columns {', '.join(AZURE_COLUMNS)}) "
            "and .jsonl (Mooncake's timestamp, input_length, output_length, hash_ids)"
        )
    rows = [row for row, _ in zip(readers[path.suffix](path), range(num), strict=False)]
    if not rows:
        raise SettingsError(f"--trace {path} holds no request")
    return sorted(rows, key=lambda row: row.stamp)


def _azure(path: Path) -> Iterator[TraceRow]:
    lines = _lines("--trace", path)
    header = _header(next(lines, (1, ""))[1])
    if header != AZURE_COLUMNS:
        raise SettingsError(f"{path}:1: the columns are {', '.join(header)[:80]!r}; wanted: {', '.join(AZURE_COLUMNS)}")
    for number, line in lines:
        try:
            stamp, input_len, output_len = next(csv.reader([line]))
            seconds = datetime.fromisoformat(stamp[:26]).timestamp()
            yield TraceRow(seconds, _length(input_len), _length(output_len))
        except (ValueError, csv.Error) as error:
            raise SettingsError(
                f"{path}:{number}: {line[:80]!r} is no row of {', '.join(AZURE_COLUMNS)}: {error}"
            ) from None


def _header(line: str) -> tuple[str, ...]:
    try:
        return tuple(next(csv.reader([line]), ()))
    except csv.Error:
        return (line,)


def _length(word: str) -> int:
    if not (word.isdecimal() and int(word) <= MAX_LEN):
        raise ValueError(f"{word!r} is no whole number from 0 to {MAX_LEN}")
    return int(word)


def _mooncake(path: Path) -> Iterator[TraceRow]:
    decoder = msgspec.json.Decoder(_Mooncake)
    for number, line in _lines("--trace", path):
        row = _decode(path, number, line, decoder)
        num_blocks = -(-row.input_length // MOONCAKE_BLOCK)
        if len(row.hash_ids) != num_blocks:
            raise SettingsError(
                f"{path}:{number}: {len(row.hash_ids)} hash_ids for {row.input_length} tokens; "
                f"wanted: {num_blocks}, one for each block of {MOONCAKE_BLOCK}"
            )
        yield TraceRow(row.timestamp / 1000, row.input_length, row.output_length, tuple(row.hash_ids))


def _decode(path: Path, number: int, line: str, decoder: msgspec.json.Decoder[_Mooncake]) -> _Mooncake:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SettingsError(f"{path}:{number}: {line[:80]!r} is no row of a Mooncake trace: {error}") from None


def read_prompts(path: Path, chat: bool) -> list[FileRow]:
    """The prompts of a JSONL file; raises `SettingsError` that names file and line if one is malformed."""
    decoder = msgspec.json.Decoder(_Line)
    rows: list[FileRow] = []
    for number, text in _lines("--prompts", path):
        try:
            line = decoder.decode(text)
            rows.append(FileRow(_read_verbatim_prompt(line, chat), line.output_len))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise SettingsError(f"{path}:{number}: {text[:80]!r} is no prompt: {error}") from None
    if not rows:
        raise SettingsError(f"--prompts {path} holds no prompt; wanted: a JSON object with `prompt` on each line")
    return rows


def _read_verbatim_prompt(line: _Line, chat: bool) -> VerbatimPrompt:
    if line.messages is not None:
        if not chat:
            raise ValueError("`messages` need --api chat")
        return VerbatimPrompt(msgspec.json.encode(line.messages), None)
    if isinstance(line.prompt, list):
        if chat:
            raise ValueError("token ids need --api completions")
        return VerbatimPrompt(msgspec.json.encode(line.prompt), len(line.prompt))
    if not line.prompt:
        raise ValueError("it has neither `prompt` (a text or token ids) nor `messages`")
    return VerbatimPrompt(text_prompt(chat, line.prompt), None)


def read_text_lines(path: Path) -> list[str]:
    """The lines of a text that are not blank; raises `SettingsError` if there are none."""
    lines = [line for _, line in _lines("--text", path)]
    if not lines:
        raise SettingsError(f"--text {path} holds no line of text")
    return lines


def _lines(flag: str, path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SettingsError(f"{flag} {path} has over {MAX_FILE_BYTES} bytes, which is the limit; cut it")
        with path.open(encoding="utf-8") as file:
            number = 0
            while line := file.readline(MAX_LINE_CHARS):
                number += 1
                if line.strip():
                    yield number, line.strip()
    except OSError as error:
        raise SettingsError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}:{_first_bad_line(path)}: {flag} takes UTF-8 text: {error.reason}") from None


def _first_bad_line(path: Path) -> int:
    """Number of the first line that is not UTF-8; the reader decodes in blocks and does not know it."""
    with path.open("rb") as file:
        return 1 + sum(1 for _ in takewhile(_is_utf8, file))


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
