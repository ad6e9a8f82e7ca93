"""Two ranks on one GPU, by turns: their peer collectives, graphs and ends are those of two GPUs."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from plait_testing import gpu_runs
from plait_testing.recording import Record
from plait_testing.running_server import Server, StartServer

pytestmark = pytest.mark.gpu
PLUGIN = Path(gpu_runs.__file__).parent / "rank_plugin"
FLAGS = ("--device", "cuda", "--tp", "2", "--num-pages", "2048")


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PLAIT_TEST_SHARED_GPU", "1")


@pytest.fixture(params=["recall-gqa", "recall-mla"])
def runs(
    request: pytest.FixtureRequest,
    check_models: Path,
    server: StartServer,
    sized: Callable[[int, int], int],
    record: Record,
) -> gpu_runs.GpuRuns:
    return gpu_runs.GpuRuns(request.param, check_models, server, sized, record, num_ranks=2)


def test_every_answer_is_right(runs: gpu_runs.GpuRuns) -> None:
    runs.answers("auto", "--mixed", "one GPU")


def test_ranks_sample_their_own_rows(runs: gpu_runs.GpuRuns) -> None:
    runs.samples()


@pytest.mark.parametrize(("fault", "code"), [("memory", 3), ("exception", 1)])
def test_the_cause_of_a_rank_s_end_is_the_server_s(
    fault: str, code: int, check_models: Path, server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank fails between captured steps, while the other waits for it inside one."""
    monkeypatch.setenv("PLAIT_TEST_FAULT", f"serving:{fault}:1")
    running = server(check_models / "recall-gqa", *FLAGS)
    assert running.url, running.errors
    stream_to_the_end(running)
    assert running.wait() == code
    assert {"memory": "out of memory", "exception": "a planted exception"}[fault] in running.last_line


def test_a_rank_that_stands_still_ends_the_other_which_names_it(
    check_models: Path, server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the midst of captured collectives: nothing tells of it but a peer that it does not come to."""
    monkeypatch.setenv("PLAIT_TEST_FAULT", "serving:hang:1")
    running = server(check_models / "recall-gqa", *FLAGS)
    assert running.url, running.errors
    stream_to_the_end(running)
    assert running.wait() == 5
    assert "rank 0 waited in vain for rank 1 in collective" in running.last_line
    assert "rank 1 is gone or stopped" in running.last_line


def test_a_stopped_rank_ends_the_other(check_models: Path, server: StartServer) -> None:
    """SIGSTOP in the midst of captured collectives: the server sees it, or before that a peer that waits."""
    running = server(check_models / "recall-gqa", *FLAGS)
    assert running.url, running.errors
    stream_to_the_end(running, lambda: worker_of(running, 1).send_signal(signal.SIGSTOP))
    assert running.wait() == 5
    assert re.search(r"rank 1 (was lost: worker 1 was|is gone or) stopped", running.last_line)


def stream_to_the_end(running: Server, after_first: Callable[[], None] = lambda: None) -> None:
    """Read a stream of a server that will lose a rank."""
    body = {"prompt": "count 1 40", "stream": True, "max_tokens": 4000, "ignore_eos": True}
    with httpx.stream("POST", running.url + "/v1/completions", json=body, timeout=60) as streamed:
        lines = (line for line in streamed.iter_lines() if line)
        next(lines)
        after_first()
        *_, last = lines
    assert "error" in last


def worker_of(running: Server, rank: int) -> psutil.Process:
    workers = [each for each in running.workers() if "plait_worker" in each.cmdline()]
    return next(each for each in workers if each.cmdline()[each.cmdline().index("--rank") + 1] == str(rank))
