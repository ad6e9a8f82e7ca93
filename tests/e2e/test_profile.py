"""`POST /admin/profile` of a running server: traces of the next steps of every rank."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from plait_testing.running_server import Server, StartServer, start_server
from plait_testing.slow_steps import SlowSteps

ADMIN_LINE = "Admin listener: "
TIMEOUT = 120
COUNT = {"prompt": "count 1 9", "max_tokens": 300, "ignore_eos": True, "temperature": 0}


@dataclass(frozen=True)
class Profiled:
    """A server with a folder for profiles."""

    server: Server
    folder: Path
    admin: httpx.Client
    pool: ThreadPoolExecutor

    def ask(self, **fields: object) -> str:
        answer = httpx.post(self.server.url + "/v1/completions", json=COUNT | fields, timeout=TIMEOUT)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def profile(self, read_seconds: float = TIMEOUT, **fields: object) -> httpx.Response:
        return self.admin.post("/admin/profile", json=fields, timeout=read_seconds)

    def begin_profile(self, read_seconds: float = TIMEOUT, **fields: object) -> Future[httpx.Response]:
        """One that waits for steps; returns once it is under way."""
        future = self.pool.submit(self.profile, read_seconds, **fields)
        wait_until(lambda: self.info()["profiling"] or future.done())
        return future

    def ask_each(self) -> list[Future[str]]:
        """A request for each replica, once both compute steps."""
        before = self.replicas()
        answers = [self.pool.submit(self.ask) for _ in before]
        wait_until(lambda: all(now["step"] > old["step"] for old, now in zip(before, self.replicas(), strict=True)))
        return answers

    def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.info()["status"]["replicas"]
        return found

    def info(self) -> dict[str, Any]:
        told: dict[str, Any] = self.admin.get("/admin/info").json()
        return told

    def steps(self, trace: dict[str, Any]) -> list[str]:
        """Names of the steps that a file has."""
        with gzip.open(self.folder / trace["file"]) as file:
            events = json.load(file)["traceEvents"]
        return [event["name"] for event in events if event["name"].startswith("step: ")]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def profiled(server: StartServer, model: Path, folder: Path, *flags: str) -> Iterator[Profiled]:
    running = server(model, "--threads=1", "--admin-port=0", f"--profile-dir={folder}", *flags)
    assert running.url, running.errors
    url = running.read_line(ADMIN_LINE).removeprefix(ADMIN_LINE)
    with httpx.Client(base_url=url, timeout=TIMEOUT) as admin, ThreadPoolExecutor(4) as pool:
        yield Profiled(running, folder, admin, pool)


def places(answer: httpx.Response) -> list[tuple[int, int]]:
    assert answer.status_code == 200, answer.text
    return [(trace["rank"], trace["replica"]) for trace in answer.json()["traces"]]


def test_each_replica_writes_its_next_steps_while_a_stream_goes_on(
    check_models: Path, server: StartServer, tmp_path: Path
) -> None:
    with profiled(server, check_models / "recall-gqa", tmp_path / "new" / "traces", "--dp=2") as both:
        plain = both.ask()
        answers = [both.pool.submit(both.ask) for _ in range(2)]
        answer = both.profile(steps=5)
        assert [answer.result() for answer in answers] == [plain, plain]
        assert places(answer) == [(0, 0), (1, 1)]
        said = answer.json()
        assert said["missing"] == []
        assert Path(said["folder"]) == both.folder
        assert {file.name for file in both.folder.iterdir()} == {trace["file"] for trace in said["traces"]}
        for trace in said["traces"]:
            assert trace["num_steps"] == len(both.steps(trace)) == 5


def test_the_ranks_of_a_replica_profile_the_same_steps(
    check_models: Path, server: StartServer, tmp_path: Path, slow_steps: SlowSteps
) -> None:
    with profiled(server, check_models / "recall-gqa", tmp_path, "--tp=2") as both:
        stream = both.pool.submit(both.ask, max_tokens=100)
        with slow_steps.within():
            first, second = both.profile(steps=3).json()["traces"]
        assert (first["first_step"], first["num_steps"]) == (second["first_step"], second["num_steps"])
        assert len(both.steps(first)) == len(both.steps(second)) == 3
        stream.result()


def test_a_profile_waits_for_steps_and_another_is_refused_meanwhile(
    check_models: Path, server: StartServer, tmp_path: Path
) -> None:
    with profiled(server, check_models / "recall-gqa", tmp_path / "traces") as one:
        waiting = one.begin_profile(steps=4)
        refused = one.profile(steps=1)
        assert "a profile is under way" in refused.json()["error"]["message"]
        one.ask(max_tokens=8)
        assert [trace["first_step"] for trace in waiting.result().json()["traces"]] == [1]
        assert len(list(one.folder.iterdir())) == 1, "no half file is left"


def test_at_the_deadline_it_has_the_steps_that_came_or_says_that_none_did(
    check_models: Path, server: StartServer, tmp_path: Path
) -> None:
    with profiled(server, check_models / "recall-gqa", tmp_path / "traces", "--dp=2") as both:
        nothing = both.profile(steps=2, deadline_seconds=0.2)
        assert nothing.status_code == 504
        assert "rank 0 computed none of the steps within 0.2 s" in nothing.json()["error"]["message"]
        both.ask(max_tokens=4)
        assert [*both.folder.iterdir()] == [], "an order is over once it was answered"

        few = both.begin_profile(steps=100, deadline_seconds=3)
        both.ask(max_tokens=4)
        said = few.result().json()
        (trace,) = said["traces"]
        assert 4 <= trace["num_steps"] == len(both.steps(trace)) < 10
        assert [one["reason"] for one in said["missing"]] == ["computed none of the steps within 3 s"]


def test_a_client_that_leaves_ends_its_profile(check_models: Path, server: StartServer, tmp_path: Path) -> None:
    with profiled(server, check_models / "recall-gqa", tmp_path / "traces") as one:
        leaving = one.begin_profile(steps=100, read_seconds=2)
        one.ask(max_tokens=4)
        with pytest.raises(httpx.ReadTimeout):
            leaving.result()
        wait_until(lambda: not one.info()["profiling"])
        wait_until(lambda: len(list(one.folder.glob("*.gz"))) == 1)
        (file,) = one.folder.iterdir()
        assert 4 <= len(one.steps({"file": file.name})) < 10


def test_a_drain_ends_a_profile_that_waits_for_steps(check_models: Path, server: StartServer, tmp_path: Path) -> None:
    with profiled(server, check_models / "recall-gqa", tmp_path) as one:
        waiting = one.begin_profile(steps=1)
        assert one.server.stop() == 0
        assert waiting.result().status_code == 503
        assert "rank 0 ended with the server" in waiting.result().json()["error"]["message"]


def test_replicas_that_step_together_profile_together(check_models: Path, server: StartServer, tmp_path: Path) -> None:
    with profiled(server, check_models / "recall-mla", tmp_path, "--dp=2", "--dp-attention") as both:
        stream = both.pool.submit(both.ask)
        first, second = both.profile(steps=3).json()["traces"]
        assert (first["first_step"], first["num_steps"]) == (second["first_step"], second["num_steps"])
        assert len(both.steps(first)) == len(both.steps(second)) == 3
        stream.result()


def test_a_lost_rank_is_named_and_the_others_traces_are_there(
    check_models: Path, server: StartServer, tmp_path: Path, slow_steps: SlowSteps
) -> None:
    flags = ("--dp=2", "--restart=group", "--dtype=float32")
    with profiled(server, check_models / "recall-gqa", tmp_path, *flags) as both:
        with slow_steps.within():
            answers = both.ask_each()
            taken = both.begin_profile(steps=20)
            both.server.workers()[1].kill()
        assert len({answer.result() for answer in answers}) == 1
        assert places(taken.result()) == [(0, 0)]
        (missing,) = taken.result().json()["missing"]
        assert (missing["rank"], missing["replica"]) == (1, 1)
        assert missing["reason"].startswith("was lost: ")

        both.server.wait_until_serving()
        wait_until(lambda: not any(one["down"] or one["late"] for one in both.replicas()))
        with slow_steps.within():
            answers = both.ask_each()
            assert places(both.profile(steps=2)) == [(0, 0), (1, 1)], "the new rank has one too"
        for answer in answers:
            answer.result()


def test_a_trace_that_cannot_be_written_ends_no_rank(check_models: Path, server: StartServer, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    with profiled(server, check_models / "recall-gqa", folder) as one:
        folder.rmdir()
        waiting = one.begin_profile(steps=1)
        one.ask(max_tokens=4)
        assert waiting.result().status_code == 503
        assert "rank 0 FileNotFoundError" in waiting.result().json()["error"]["message"]
        folder.mkdir()
        waiting = one.begin_profile(steps=1)
        one.ask(max_tokens=4)
        assert places(waiting.result()) == [(0, 0)]


@pytest.fixture(scope="module")
def unprofiled(check_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The admin listener of a server without a folder for profiles."""
    log = tmp_path_factory.mktemp("unprofiled") / "log"
    running = start_server(log, check_models / "recall-gqa", "--threads=1", "--admin-port=0")
    url = running.read_line(ADMIN_LINE).removeprefix(ADMIN_LINE)
    with httpx.Client(base_url=url, timeout=TIMEOUT) as admin:
        yield admin
    running.kill()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [({"steps": 0}, "`$.steps`"), ({"steps": 101}, "<= 100"), ({"deadline_seconds": 0}, "> 0"), ({"x": 1}, "`x`")],
)
def test_a_broken_body_is_refused_with_what_is_allowed(
    unprofiled: httpx.Client, fields: dict[str, object], problem: str
) -> None:
    answer = unprofiled.post("/admin/profile", json=fields)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


def test_without_a_folder_a_profile_is_refused_with_the_flag(unprofiled: httpx.Client) -> None:
    answer = unprofiled.post("/admin/profile", json={"steps": 1})
    assert answer.status_code == 409
    assert "--profile-dir FOLDER" in answer.json()["error"]["message"]
