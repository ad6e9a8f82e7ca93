"""Two ranks on one GPU, by turns: their peer collectives, graphs and ends are those of two GPUs."""

from __future__ import annotations

import os
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
SHARED = Path(gpu_runs.__file__).parent / "shared_gpu"
FLAGS = ("--device", "cuda", "--tp", "2", "--num-pages", "2048")


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SHARED), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize("model", ["recall-gqa", "recall-mla"])
def test_every_answer_is_right(
    model: str, check_models: Path, server: StartServer, sized: Callable[[int, int], int], record: Record
) -> None:
    runs = gpu_runs.GpuRuns(model, check_models, server, sized, record, num_ranks=2)
    runs.answers("auto", "--mixed", "one GPU")


def test_a_stopped_rank_ends_the_other_which_names_it(check_models: Path, server: StartServer) -> None:
    """SIGSTOP in the midst of captured collectives: nothing tells of it but a peer that does not come."""
    running = server(check_models / "recall-gqa", *FLAGS)
    assert running.url, running.errors
    lose(running, 1, signal.SIGSTOP)
    assert running.wait() == 5
    assert "rank 0 waited in vain for rank 1 in collective" in running.last_line
    assert "rank 1 is gone or stopped" in running.last_line


def lose(running: Server, rank: int, number: signal.Signals) -> None:
    """Send a signal to a rank that serves a stream, and read the stream to its end."""
    body = {"prompt": "count 1 40", "stream": True, "max_tokens": 4000, "ignore_eos": True}
    with httpx.stream("POST", running.url + "/v1/completions", json=body, timeout=60) as streamed:
        lines = (line for line in streamed.iter_lines() if line)
        next(lines)
        worker_of(running, rank).send_signal(number)
        *_, last = lines
    assert "a worker was lost" in last


def worker_of(running: Server, rank: int) -> psutil.Process:
    workers = [each for each in running.workers() if "plait_worker" in each.cmdline()]
    return next(each for each in workers if each.cmdline()[each.cmdline().index("--rank") + 1] == str(rank))
