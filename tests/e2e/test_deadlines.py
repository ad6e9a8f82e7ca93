"""Deadlines of requests, and where sampling defaults come from, on a running server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from plait_testing.running_server import Server, StartServer, start_server
from plait_testing.slow_steps import SlowSteps

TIMEOUT = 120
BODY = {"prompt": "abc", "ignore_eos": True}
LIMITS = {"request": 3, "first-token": 2, "idle": 2}
ADMIN_LINE = "Admin listener: "


@pytest.fixture(scope="module")
def bounded(check_models: Path, recall_steps: SlowSteps, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = [f"--{what}-timeout-seconds={seconds}" for what, seconds in LIMITS.items()]
    own = ("--threads=1", "--admin-port=0", '--override-generation-config={"temperature": 0}')
    with recall_steps.of_servers():
        log = tmp_path_factory.mktemp("deadlines") / "log"
        server = start_server(log, check_models / "recall-gqa", *own, *limits)
    assert server.url, server.errors
    yield server
    server.kill()


def ask(server: Server, **fields: object) -> httpx.Response:
    return httpx.post(server.url + "/v1/completions", json=BODY | fields, timeout=TIMEOUT)


@pytest.fixture(scope="module")
def admin(bounded: Server) -> Iterator[httpx.Client]:
    url = bounded.read_line(ADMIN_LINE).removeprefix(ADMIN_LINE)
    with httpx.Client(base_url=url, timeout=TIMEOUT) as client:
        yield client


def last_event(lines: Iterable[str]) -> Any:
    return json.loads([line for line in lines if line][-1].removeprefix("data: "))


def assert_late(body: Any, limit: str) -> None:
    assert body["error"]["code"] == "deadline_exceeded"
    assert f"--{limit}-timeout-seconds" in body["error"]["message"]


def test_a_request_that_takes_too_long_is_ended_streamed_or_whole(bounded: Server, recall_steps: SlowSteps) -> None:
    with recall_steps.within(), ThreadPoolExecutor() as pool:
        waiting = [pool.submit(ask, bounded, max_tokens=4000, stream=stream) for stream in (False, True)]
        whole, streamed = (answer.result() for answer in waiting)
    assert whole.status_code == 504
    assert_late(whole.json(), "request")
    assert streamed.status_code == 200
    assert_late(last_event(streamed.text.splitlines()), "request")
    assert ask(bounded, max_tokens=4).status_code == 200, "one in time is answered"


def test_a_first_token_or_a_next_one_that_does_not_come_ends_a_request(bounded: Server, admin: httpx.Client) -> None:
    url, long = bounded.url + "/v1/completions", BODY | {"max_tokens": 4000, "stream": True}
    with httpx.stream("POST", url, json=long, timeout=TIMEOUT) as begun, ThreadPoolExecutor() as pool:
        lines = begun.iter_lines()
        assert next(lines).startswith("data: {")
        admin.post("/admin/pause")
        late = pool.submit(ask, bounded, max_tokens=4)
        assert_late(last_event(lines), "idle")
        assert late.result().status_code == 504
        assert_late(late.result().json(), "first-token")
    admin.post("/admin/resume")
    bounded.wait_until_serving()
    assert ask(bounded, max_tokens=4).status_code == 200


def test_sampling_defaults_are_overridden(bounded: Server) -> None:
    texts = {ask(bounded, max_tokens=8).json()["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 1, "greedy"


def test_sampling_defaults_that_are_none_are_refused(server: StartServer, check_models: Path) -> None:
    model = check_models / "recall-gqa"
    unknown = server(model, '--override-generation-config={"max_new_tokens": 4}')
    assert "`max_new_tokens` is not known" in unknown.last_line
    missing = server(model, "--generation-config=/nowhere")
    assert "/nowhere/generation_config.json: is missing" in missing.last_line
