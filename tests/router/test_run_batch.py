"""`plait run-batch` without an engine: every line has one result, whatever was killed when."""

import asyncio
import errno
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plait.errors import SettingsError, StartError
from plait.offline import batch_input
from plait.offline.batch_input import BatchFile
from plait.offline.batch_results import ResultFile
from plait.offline.calls import Answer
from plait.offline.progress import Progress
from plait.offline.run_batch import answer_lines

NUM_LINES = 60


def request(custom_id: str, **changes: Any) -> str:
    same = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": custom_id}}
    return msgspec.json.encode(same | changes).decode()


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


async def echo(url: str, body: bytes) -> Answer:
    """Answers with the body; those whose prompt is even after those that were asked later."""
    prompt = msgspec.json.decode(body)["prompt"]
    if prompt[-1] in "02468":
        await asyncio.sleep(0)
    return Answer(200, msgspec.json.encode({"id": f"cmpl-{prompt}", "prompt": prompt}))


def run(in_path: Path, out_path: Path, ask: Callable[[str, bytes], Any] = echo, max_in_flight: int = 4) -> None:
    batch = BatchFile(in_path)
    with ResultFile(out_path, batch) as results:
        asyncio.run(answer_lines(batch, results, ask, max_in_flight, Progress(len(batch))))


def results_of(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


class Killed(BaseException):
    """Stands for SIGKILL: what was written stays, and nothing else."""


def kill_at(patch: pytest.MonkeyPatch, write_number: int, share: float) -> None:
    """The process dies in that write, of which a share of the bytes has reached the file."""
    write, num_writes = os.write, 0

    def dying(file: int, line: bytes) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes < write_number:
            return write(file, line)
        if num_writes == write_number:
            write(file, bytes(line)[: round(share * len(line))])
        raise Killed

    patch.setattr(os, "write", dying)


@pytest.mark.parametrize("seed", range(5))
def test_after_ten_kills_at_random_every_line_has_one_result(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    ids = [f"request-{number}" for number in range(NUM_LINES)]
    in_path, out_path = write(tmp_path / "in", *map(request, ids)), tmp_path / "out"
    for _ in range(10):
        with pytest.MonkeyPatch.context() as patch:
            # Nothing of the line, a part of it, or all; 10 kills of 5 lines at most leave some to do.
            kill_at(patch, draw.randint(1, 5), draw.choice([0, draw.random(), 1]))
            with pytest.raises(Killed):
                run(in_path, out_path)
    run(in_path, out_path)
    found = results_of(out_path)
    assert Counter(line["custom_id"] for line in found) == Counter(ids)
    assert all(line["response"]["body"]["prompt"] == line["custom_id"] for line in found)
    before = out_path.read_bytes()
    run(in_path, out_path)
    assert out_path.read_bytes() == before


def test_a_result_has_openais_form(tmp_path: Path) -> None:
    run(write(tmp_path / "in", request("a")), tmp_path / "out")
    [line] = results_of(tmp_path / "out")
    assert line.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "cmpl-a", "body": {"id": "cmpl-a", "prompt": "a"}}
    assert line == {"custom_id": "a", "response": response, "error": None}


def test_a_broken_line_is_reported_by_its_number_and_the_rest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_input, "MAX_LINE_BYTES", 200)
    lines = [
        request("a"),
        "{",
        "",
        request("a"),
        "{}",
        request("b", url="/v1/images"),
        request("c", method="GET"),
        request("d", body={"prompt": "x" * 300}),
        request("e"),
    ]
    in_path, out_path = write(tmp_path / "in", *lines), tmp_path / "out"
    run(in_path, out_path)
    found = results_of(out_path)
    assert sorted(line["custom_id"] for line in found if line["response"]) == ["a", "e"]
    errors = {line["error"]["line"]: line["error"] for line in found if line["error"]}
    assert {number: error["code"] for number, error in errors.items()} == {
        2: "invalid_json_line",
        4: "duplicate_custom_id",
        5: "invalid_line",
        6: "invalid_url",
        7: "invalid_method",
        8: "line_too_long",
    }
    assert errors[4]["message"] == "line 4 has the `custom_id` 'a' of line 1; give each its own"
    before = out_path.read_bytes()
    run(in_path, out_path)
    assert out_path.read_bytes() == before


def test_no_more_than_the_bound_are_asked_at_a_time(tmp_path: Path) -> None:
    in_flight, most = 0, 0

    async def ask(url: str, body: bytes) -> Answer:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0)
        in_flight -= 1
        return await echo(url, body)

    run(write(tmp_path / "in", *(request(f"{number}") for number in range(20))), tmp_path / "out", ask, 3)
    assert most == 3
    assert len(results_of(tmp_path / "out")) == 20


def test_an_engine_that_ends_leaves_the_rest_to_the_next_run(tmp_path: Path) -> None:
    async def ask(url: str, body: bytes) -> Answer:
        if b'"5"' in body:
            raise ConnectionError("the engine has ended")
        return await echo(url, body)

    in_path = write(tmp_path / "in", *(request(f"{number}") for number in range(10)))
    with pytest.raises(ConnectionError):
        run(in_path, tmp_path / "out", ask)
    assert "5" not in {line["custom_id"] for line in results_of(tmp_path / "out")}
    run(in_path, tmp_path / "out")
    assert len(results_of(tmp_path / "out")) == 10


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("my notes", "has on line 1 no result of a batch; name another file"),
        ("my notes\n", "has on line 1 no result of a batch; name another file"),
        ('{"id":"batch_req_1","custom_id":"z","response":null,"error":null}\n', "has on line 1 a result for 'z'"),
        (
            '{"id":"batch_req_1","custom_id":null,"response":null,"error":{"code":"x","message":"y","line":1}}\n',
            "has on line 1 a result for line 1, which IN does not have so",
        ),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "out").write_text(content)
    with pytest.raises(SettingsError) as refused:
        run(write(tmp_path / "in", request("a")), tmp_path / "out")
    assert said in refused.value.message
    assert (tmp_path / "out").read_text() == content


def test_two_runs_never_write_one_file(tmp_path: Path) -> None:
    batch = BatchFile(write(tmp_path / "in", request("a")))
    with ResultFile(tmp_path / "out", batch), pytest.raises(SettingsError, match="is being written by another run"):
        ResultFile(tmp_path / "out", batch)


def test_a_full_disk_says_that_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, line: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    in_path = write(tmp_path / "in", request("a"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StartError) as refused:
            run(in_path, tmp_path / "out")
    assert "No space left on device; make room and run the same command again" in refused.value.message
    assert refused.value.exit_code == 3


def test_results_go_to_a_file_that_can_be_read_again(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is no file; name one, which a later run can read"):
        run(write(tmp_path / "in", request("a")), Path("/dev/null"))
