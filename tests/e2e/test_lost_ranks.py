"""Ranks that are lost are started again, and every stream goes on behind its last token."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from plait_testing.held_steps import HeldSteps
from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server, StartServer, start_server

NUM_TOKENS = 40
HANG_SECONDS = 240.0
"""A step is given up after less."""
FLAGS = ("--threads", "1", "--max-model-len", "1024", "--dtype", "float32", "--restart", "group")
GREEDY = {"prompt": "count 1 9", "temperature": 0}
SEEDED = {"prompt": "count 2 31", "temperature": 1.3, "top_p": 0.95, "seed": 7, "frequency_penalty": 0.4}
CONSTRAINED = {"prompt": "say", "temperature": 1.0, "seed": 3, "structured_outputs": {"regex": "[a-f]{80}"}}
ASKED: list[dict[str, Any]] = [GREEDY, SEEDED, CONSTRAINED]


class Answer:
    """What one stream has brought."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.logprobs: list[float] = []
        self.ends: list[str] = []
        self.error: dict[str, Any] = {}

    def take(self, line: str) -> None:
        if not line.startswith("data: {"):
            return
        event = json.loads(line.removeprefix("data: "))
        self.error = event.get("error", self.error)
        for choice in event.get("choices", []):
            if choice["logprobs"] is not None:
                self.tokens += choice["logprobs"]["tokens"]
                self.logprobs += choice["logprobs"]["token_logprobs"]
            self.ends += [choice["finish_reason"]] if choice["finish_reason"] else []


def stream(url: str, asked: dict[str, Any]) -> Answer:
    """One streamed answer."""
    body = asked | {"max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "logprobs": 1}
    answer = Answer()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=240) as got:
        for line in got.iter_lines():
            answer.take(line)
    return answer


def assert_same(given: Answer, right: Answer) -> None:
    """Every token once, and every log-probability."""
    assert given.error == {}
    assert given.tokens == right.tokens
    assert given.logprobs == pytest.approx(right.logprobs, abs=1e-3)
    assert given.ends == right.ends


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldSteps]:
    """Holds the steps of this module's servers."""
    held = HeldSteps(tmp_path_factory.mktemp("held"))
    with held.of_servers():
        yield held


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["one rank", "two ranks"])
def replica(
    request: pytest.FixtureRequest, check_models: Path, steps: HeldSteps, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server whose only replica has one rank or two."""
    log = tmp_path_factory.mktemp("lost") / "server.log"
    flags = (*FLAGS, "--tp", str(request.param), "--restart-budget", "99")
    one = start_server(log, check_models / "recall-gqa", *flags)
    assert one.url, one.errors
    yield one
    one.kill()


def under_way(running: Server, steps: HeldSteps, strike: Callable[[], object]) -> list[Answer]:
    """The answers to all requests; `strike` happens while the ranks wait in a step with a token for each of them."""
    num_ranks = len(running.workers())
    steps.begin(len(ASKED))
    with ThreadPoolExecutor(len(ASKED)) as pool:
        answers = [pool.submit(stream, running.url, asked) for asked in ASKED]
        try:
            steps.wait_until_held(num_ranks)
            strike()
        finally:
            steps.end()
        return [answer.result() for answer in answers]


def wait_until_down(running: Server) -> None:
    """Until `/ready` says that the ranks are gone."""
    deadline = time.monotonic() + 60
    while "the ranks start again" not in httpx.get(running.url + "/ready", timeout=60).text:
        assert time.monotonic() < deadline


def health_until_back(running: Server) -> set[int]:
    """What `/health` answers until other ranks serve."""
    said: set[int] = set()
    while True:
        status = httpx.get(running.url + "/health", timeout=60).status_code
        if not read_metrics(running.url)["plait_replica_down"]:
            return said
        said.add(status)


def wait_for_spares(running: Server, num_spares: int) -> set[int]:
    """The processes that wait to become ranks."""
    deadline = time.monotonic() + 60
    while len(spares := running.spares()) < num_spares:
        assert time.monotonic() < deadline
    return {spare.pid for spare in spares}


def wait_until_taken(running: Server, num_requests: int) -> None:
    """Until the scheduler has so many requests."""
    deadline = time.monotonic() + 60
    while sum(read_metrics(running.url)[f"plait_requests_{state}"] for state in ("running", "waiting")) < num_requests:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_streams_go_on_behind_their_last_token_after_a_loss(
    replica: Server, steps: HeldSteps, number: signal.Signals
) -> None:
    right = [stream(replica.url, asked) for asked in ASKED]
    before = read_metrics(replica.url)
    ranks = replica.workers()
    spares = wait_for_spares(replica, len(ranks))

    def strike() -> None:
        ranks[-1].send_signal(number)
        wait_until_down(replica)
        assert health_until_back(replica) <= {503}, "no step runs"

    for given, expected in zip(under_way(replica, steps, strike), right, strict=True):
        assert_same(given, expected)
    after = read_metrics(replica.url)
    gained = {name: after[name] - before[name] for name in ("plait_rank_losses_total", "plait_requests_replayed_total")}
    assert gained == {"plait_rank_losses_total": 1, "plait_requests_replayed_total": len(ASKED)}
    assert all(not rank.is_running() for rank in ranks), "no process of the lost ranks is left"
    assert {rank.pid for rank in replica.workers()} == spares, "the new ranks are those that waited"
    assert replica.wait_until_serving() == {"status": "ok"}


@pytest.mark.slow
@pytest.mark.parametrize("restart", ["group", "never"])
def test_a_rank_that_hangs_in_a_step_writes_where_before_it_is_killed(
    server: StartServer, steps: HeldSteps, check_models: Path, restart: str
) -> None:
    running = server(check_models / "recall-gqa", *FLAGS, "--restart", restart)
    right = [stream(running.url, asked) for asked in ASKED]
    [hanging] = running.workers()
    steps.begin(len(ASKED))
    with ThreadPoolExecutor(len(ASKED)) as pool:
        answers = [pool.submit(stream, running.url, asked) for asked in ASKED]
        steps.wait_until_held(1)
        assert hanging.wait(timeout=HANG_SECONDS) is None
        steps.end()
        given = [answer.result() for answer in answers]
    # The function that does not return, and below it the loop that called it.
    assert re.search(r"sitecustomize.py\", line \d+ in launch_later\n(.*\n)*.*in run\n", running.errors)
    if restart == "never":
        assert running.wait() == 5
        assert "no result in time" in running.last_line
        return
    for answer, expected in zip(given, right, strict=True):
        assert_same(answer, expected)
    assert read_metrics(running.url)["plait_rank_losses_total"] == 1


@pytest.mark.slow
def test_requests_that_come_while_ranks_are_lost_wait_for_others(replica: Server) -> None:
    right = stream(replica.url, GREEDY)
    for rank in replica.workers():
        rank.kill()
    wait_until_down(replica)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: stream(replica.url, GREEDY), range(4)))
    for answer in answers:
        assert_same(answer, right)


def test_a_request_that_kills_workers_twice_is_refused_and_the_others_go_on(replica: Server, steps: HeldSteps) -> None:
    right = [stream(replica.url, asked) for asked in ASKED]
    before = read_metrics(replica.url)["plait_rank_losses_total"]
    with ThreadPoolExecutor(1) as pool:
        poison: list[Future[httpx.Response]] = []

        def send_poison() -> None:
            body = {"prompt": "~poison~", "max_tokens": 4}
            poison.append(pool.submit(httpx.post, f"{replica.url}/v1/completions", json=body, timeout=240))
            wait_until_taken(replica, len(ASKED) + 1)

        for given, expected in zip(under_way(replica, steps, send_poison), right, strict=True):
            assert_same(given, expected)
        refused = poison[0].result()
    assert refused.status_code == 500
    assert refused.json()["error"]["code"] == "took_workers_down"
    assert read_metrics(replica.url)["plait_rank_losses_total"] - before == 2


def test_a_request_whose_logits_are_nan_ends_alone_and_leaves_no_pages(replica: Server, steps: HeldSteps) -> None:
    right = [stream(replica.url, asked) for asked in ASKED]
    before, ranks = read_metrics(replica.url)["plait_rank_losses_total"], replica.workers()
    with ThreadPoolExecutor(1) as pool:
        spoilt: list[Future[httpx.Response]] = []

        def send_spoilt() -> None:
            spoilt.append(pool.submit(post))
            wait_until_taken(replica, len(ASKED) + 2)

        def post() -> httpx.Response:
            body = {"prompt": "~nan~" + "." * 100, "max_tokens": 4, "n": 2}
            return httpx.post(f"{replica.url}/v1/completions", json=body, timeout=240)

        for given, expected in zip(under_way(replica, steps, send_spoilt), right, strict=True):
            assert_same(given, expected)
        failed = [spoilt[0].result(), post()]
    # With cached pages the second prompt would be computed behind what makes it NaN.
    assert [answer.status_code for answer in failed] == [500, 500]
    assert {answer.json()["error"]["code"] for answer in failed} == {"not_finite"}
    assert read_metrics(replica.url)["plait_rank_losses_total"] == before
    assert replica.workers() == ranks


@pytest.mark.slow
def test_a_drain_while_ranks_are_lost_ends_when_the_streams_have(
    server: StartServer, steps: HeldSteps, check_models: Path
) -> None:
    running = server(check_models / "recall-gqa", *FLAGS)
    right = [stream(running.url, asked) for asked in ASKED]

    def drain_a_lost_one() -> None:
        running.workers()[0].kill()
        wait_until_down(running)
        running.process.send_signal(signal.SIGTERM)
        running.wait_until_draining()

    for given, expected in zip(under_way(running, steps, drain_a_lost_one), right, strict=True):
        assert_same(given, expected)
    assert running.wait() == 0


@pytest.mark.slow
def test_replicas_get_their_ranks_back(server: StartServer, steps: HeldSteps, check_models: Path) -> None:
    running = server(check_models / "recall-gqa", "--dp", "2", *FLAGS)
    right = stream(running.url, GREEDY)
    ranks = running.workers()
    steps.begin(1)
    with ThreadPoolExecutor(64) as pool:
        answers: list[Future[Answer]] = []
        deadline = time.monotonic() + 60
        # A late heartbeat may send several to one replica.
        while not all(num_under_way := [num_running(running, number) for number in (0, 1)]):
            assert time.monotonic() < deadline
            if sum(num_under_way) == len(answers):
                answers.append(pool.submit(stream, running.url, GREEDY))
        steps.wait_until_held(2)
        for rank in ranks:
            rank.kill()
        steps.end()
        for answer in answers:
            assert_same(answer.result(), right)
    assert running.wait_until_serving() == {"status": "ok"}
    assert running.stop(signal.SIGTERM) == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_streams_of_a_lost_replica_go_on_in_another_one_at_once(
    num_ranks: int, server: StartServer, steps: HeldSteps, check_models: Path
) -> None:
    running = server(check_models / "recall-gqa", "--dp", "2", "--tp", str(num_ranks), *FLAGS)
    right = [stream(running.url, asked) for asked in ASKED]
    wait_for_spares(running, num_ranks)
    lost = running.workers()[:num_ranks]
    steps.begin(1)
    with ThreadPoolExecutor(64) as pool:
        answers: list[Future[Answer]] = []
        deadline = time.monotonic() + 60
        # A late heartbeat may send several to one replica.
        while len(answers) < 2 * len(ASKED) or not all(num_running(running, number) for number in (0, 1)):
            assert time.monotonic() < deadline
            answers.append(pool.submit(stream, running.url, ASKED[len(answers) % len(ASKED)]))
            wait_until_replicas_have(running, len(answers))
        steps.wait_until_held(2 * num_ranks)
        num_lost = of_replica(running, "plait_requests_running", 0) + of_replica(running, "plait_requests_waiting", 0)
        for spare in running.spares():
            spare.suspend()
        lost[-1].kill()
        steps.end()
        for number, answer in enumerate(answers):
            assert_same(answer.result(), right[number % len(ASKED)])
    told = [of_replica(running, f"plait_{name}", 0) for name in ("replica_down", "requests_moved_total")]
    assert told == [1, num_lost], "all have ended, and no rank has started"
    assert of_replica(running, "plait_rank_losses_total", 1) == 0
    for spare in running.spares():
        spare.resume()
    deadline = time.monotonic() + 60
    while of_replica(running, "plait_replica_down", 0):
        assert time.monotonic() < deadline
    assert not any(rank.is_running() for rank in lost), "no process of the lost replica is left"
    pages = read_metrics(running.url)
    held = [pages[f'plait_kv_pages{{replica="{replica}",state="leased"}}'] for replica in (0, 1)]
    assert held == [0, 0]
    assert running.stop(signal.SIGTERM) == 0


def wait_until_replicas_have(running: Server, num_requests: int) -> None:
    """Until the schedulers have so many requests."""
    deadline = time.monotonic() + 60
    names = [f"plait_requests_{state}" for state in ("running", "waiting")]
    while sum(of_replica(running, name, number) for name in names for number in (0, 1)) < num_requests:
        assert time.monotonic() < deadline


def of_replica(running: Server, name: str, replica: int) -> float:
    """A metric of one of the replicas."""
    return read_metrics(running.url)[f'{name}{{replica="{replica}"}}']


def num_running(running: Server, replica: int) -> float:
    return of_replica(running, "plait_requests_running", replica)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--restart-budget", "0"], "--restart-budget allows"),
        pytest.param(["--restart", "never"], "worker 0 was killed by SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_without_a_budget_a_loss_ends_the_server(
    server: StartServer, check_models: Path, flags: list[str], why: str
) -> None:
    running = server(check_models / "recall-gqa", *FLAGS, *flags)
    running.workers()[0].kill()
    assert running.wait() == 5
    assert why in running.last_line


@pytest.mark.slow
def test_a_model_that_changed_is_not_served_by_new_ranks(
    server: StartServer, check_models: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(check_models / "recall-gqa", model)
    running = server(model, *FLAGS)
    os.utime(model / "config.json")
    running.workers()[0].kill()
    assert running.wait() == 5
    assert "config.json has changed since the server started" in running.last_line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "why"),
    [("[1.5", "cannot be read"), ('{"model": "/other", "losses": []}', "counts the restarts of /other, not of ")],
)
def test_a_restart_file_that_is_broken_or_another_models_is_refused(
    server: StartServer, check_models: Path, tmp_path: Path, content: str, why: str
) -> None:
    file = tmp_path / "restarts"
    file.write_text(content)
    running = server(check_models / "recall-gqa", *FLAGS, "--restart-file", str(file))
    assert running.wait() == 2
    assert why in running.last_line


def test_a_restart_file_that_cannot_be_written_is_refused_at_the_start(
    server: StartServer, check_models: Path, tmp_path: Path
) -> None:
    file = tmp_path / "gone" / "restarts"
    running = server(check_models / "recall-gqa", *FLAGS, "--restart-file", str(file))
    assert running.wait() == 2
    assert f"--restart-file {file} cannot be written: No such file or directory; give a file in" in running.last_line


def test_a_second_server_with_the_restart_file_of_a_living_one_is_refused(
    server: StartServer, check_models: Path, tmp_path: Path
) -> None:
    file, link = tmp_path / "restarts", tmp_path / "link"
    link.symlink_to(file)
    flags = (check_models / "recall-gqa", *FLAGS, "--restart-file")
    first = server(*flags, str(file))
    assert first.url, first.errors[-4000:]
    second = server(*flags, str(link))
    assert second.wait() == 2
    assert f"--restart-file {link} counts the losses of a server that runs already: give each" in second.last_line
    assert httpx.get(f"{first.url}/health").status_code == 200
    first.process.kill()
    first.wait()
    assert server(*flags, str(link)).url, "a killed server holds nothing"
