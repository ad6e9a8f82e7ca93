"""The end of ranks whose replica was lost: real processes, which hang while they read their configuration."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from plait.launch.lost_ranks import end_lost
from plait.launch.worker import Worker, start_rank

NO_RESULT = "a step has had no result in time: its device hangs, or the rank does"
FRAME = "in _read_config"
"""Where such a rank is, as Python writes it."""


@pytest.fixture
def blocked() -> set[signal.Signals]:
    """Signals that the rank does not take."""
    return set()


@pytest.fixture
def hanging(tmp_path: Path, blocked: set[signal.Signals]) -> Iterator[Worker]:
    """A rank that waits in a call of the system, for the other end of a pipe to write."""
    config = tmp_path / "worker.json"
    os.mkfifo(config)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    process = start_rank(0, f"ipc://{tmp_path}/engine", config)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    writer = open_for_reader(config)
    try:
        yield Worker(0, process)
    finally:
        process.kill()
        process.wait()
        os.close(writer)


def open_for_reader(pipe: Path) -> int:
    """The end to write to, once another process reads."""
    deadline = time.monotonic() + 240
    while True:
        with suppress(OSError):  # nobody has opened the other end
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end(worker: Worker, reason: str, seconds: float, killed_after: float | None = None) -> float:
    """Seconds until the process has ended. Another may kill it meanwhile."""

    def kill() -> None:
        os.kill(worker.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)

    async def watched() -> float:
        worker.watch(asyncio.get_running_loop(), lambda worker: None)
        began = time.monotonic()
        if killed_after is not None:
            asyncio.get_running_loop().call_later(killed_after, kill)
        await end_lost([worker], reason, seconds)
        return time.monotonic() - began

    return asyncio.run(watched())


def test_a_rank_that_hangs_writes_where_before_it_is_killed(hanging: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    end(hanging, NO_RESULT, seconds=0.3)
    assert hanging.was_killed
    said = capfd.readouterr()
    assert FRAME in said.err
    assert said.out == ""


def test_a_stopped_rank_is_killed_at_once_and_the_log_says_why_it_wrote_nothing(
    hanging: Worker, capfd: pytest.CaptureFixture[str]
) -> None:
    os.kill(hanging.pid, signal.SIGSTOP)
    while not hanging.is_stopped:
        time.sleep(0.01)
    assert end(hanging, NO_RESULT, seconds=60) < 30
    said = capfd.readouterr()
    assert hanging.was_killed
    assert FRAME not in said.err
    assert "worker 0 has not written where its threads are: its process is stopped (SIGSTOP" in said.out


@pytest.mark.parametrize("blocked", [{signal.SIGUSR2}])
def test_a_rank_that_takes_no_signal_is_waited_for_no_longer_than_a_bound(
    hanging: Worker, capfd: pytest.CaptureFixture[str]
) -> None:
    assert end(hanging, NO_RESULT, seconds=0.3) < 30
    assert hanging.was_killed
    assert "worker 0 has not written where its threads are: its process waits in the kernel" in capfd.readouterr().out


def test_a_rank_that_was_lost_for_another_reason_writes_nothing(
    hanging: Worker, capfd: pytest.CaptureFixture[str]
) -> None:
    end(hanging, "rank 1 was lost: worker 1 was killed by SIGKILL", seconds=0.3)
    assert hanging.was_killed
    assert FRAME not in capfd.readouterr().err


@pytest.mark.parametrize("blocked", [{signal.SIGUSR2}])
def test_nobody_waits_for_the_stacks_of_a_rank_that_has_ended(
    hanging: Worker, capfd: pytest.CaptureFixture[str]
) -> None:
    end(hanging, NO_RESULT, seconds=60, killed_after=0.2)
    assert "has not written where its threads are" not in capfd.readouterr().out


def test_a_rank_may_end_as_its_time_runs_out(hanging: Worker) -> None:
    end(hanging, "rank 1 was lost", seconds=0.2, killed_after=0.2)
    assert hanging.was_killed
