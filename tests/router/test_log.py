"""Log lines as JSON objects."""

from __future__ import annotations

import json
import logging
import select
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from plait.log import RankLines, log, say_last, write_json_lines


@pytest.fixture
def _json_lines() -> Iterator[None]:
    write_json_lines(True)
    yield
    write_json_lines(False)


def records(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capfd.readouterr().err.splitlines()]


def test_text_lines_have_fields_behind_the_message(capfd: pytest.CaptureFixture[str]) -> None:
    log("http", "", fields={"status": 200, "seconds": 0.5, "reason": None})
    assert capfd.readouterr().err.endswith(" INFO http: status=200 seconds=0.500 reason=-\n")


@pytest.mark.usefixtures("_json_lines")
def test_fields_without_a_value_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    log("http", "ended", "WARNING", fields={"status": 200, "reason": None})
    say_last("over")
    first, last = records(capfd)
    assert first | {"time": ""} == {"time": "", "level": "WARNING", "source": "http", "message": "ended", "status": 200}
    assert (last["source"], last["level"], last["message"]) == ("plait", "ERROR", "over")


@pytest.mark.usefixtures("_json_lines")
def test_a_long_message_becomes_lines_that_a_pipe_takes_whole(capfd: pytest.CaptureFixture[str]) -> None:
    message = "\x01€" * 2000
    log("http", message)
    lines = capfd.readouterr().err.splitlines()
    assert all(len(line.encode()) < select.PIPE_BUF for line in lines)
    assert "".join(json.loads(line)["message"] for line in lines) == message


@pytest.mark.usefixtures("_json_lines")
def test_librarys_logs_and_warnings_are_objects_with_their_tracebacks(capfd: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("wrong")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("in the app")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    error, warning = records(capfd)
    assert (error["source"], error["level"]) == ("uvicorn.error", "ERROR")
    assert error["message"].startswith("in the app\nTraceback")
    assert (warning["source"], warning["level"]) == ("py.warnings", "WARNING")


def test_a_ranks_lines_keep_their_time_and_level(capfd: pytest.CaptureFixture[str]) -> None:
    rank = RankLines(3)
    rank.add(b"2026-01-31 12:00:00,250 ERROR rank 3: a bug\nTrace")
    rank.add(b"back\n\n2026-01-31 12:00:00,251 INFO rank 3: on\nno end")
    rank.add(b"")
    said = records(capfd)
    assert {line["source"] for line in said} == {"rank 3"}
    assert [(line["level"], line["message"]) for line in said] == [
        ("ERROR", "a bug"),
        ("ERROR", "Traceback"),
        ("INFO", "on"),
        ("INFO", "no end"),
    ]
    assert said[0]["time"].startswith("2026-01-31T12:00:00.250")
