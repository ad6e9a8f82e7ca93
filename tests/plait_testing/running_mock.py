"""A mock server in a process of its own, and what a client should have seen of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
from plait.bench.messages import Outcome
from plait.bench.run import Run

from plait_testing.mock_server import Told
from plait_testing.mock_timing import Timing, flags


class Mock:
    """A running mock."""

    def __init__(self, url: str, process: subprocess.Popen[str]) -> None:
        self.url = url
        self.process = process

    def truth(self) -> list[Told]:
        """What it sent since the last time it was asked."""
        return msgspec.json.decode(httpx.get(f"{self.url}/truth", timeout=60).content, type=list[Told])

    def gather(self, num: int) -> None:
        """Let the next answers wait until so many requests are there."""
        httpx.get(f"{self.url}/gather/{num}", timeout=60).raise_for_status()


@contextmanager
def running_mock(timing: Timing) -> Iterator[Mock]:
    """A mock that ends with the block."""
    command = [sys.executable, str(Path(__file__).with_name("mock_server.py")), *flags(timing)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Mock(process.stdout.readline().strip(), process)
    finally:
        process.kill()
        process.communicate()


def as_sent(run: Run, told: list[Told]) -> Run:
    """The run with the server's times in place of the client's.

    `told` may begin with warm-ups. Requests are paired by the length of their answers, those of one length in the
    order of their ends.
    """
    requests = run.load.requests
    seen = sorted(run.outcomes, key=lambda one: (requests[one.index].output_len, one.ended))
    true = sorted(told[len(told) - len(seen) :], key=lambda one: (one.max_tokens, one.ended or one.came))
    outcomes = [_true(outcome, one) for outcome, one in zip(seen, true, strict=True)]
    return msgspec.structs.replace(run, outcomes=outcomes)


def _true(outcome: Outcome, told: Told) -> Outcome:
    if outcome.failure is not None:
        return outcome
    times, counts = outcome.arrivals, outcome.tokens
    for place, sent in enumerate(told.sent[: len(times)]):
        times[place] = sent
    for place, num in enumerate(told.tokens[: len(counts)]):
        counts[place] = num
    num = sum(told.tokens)
    seen = {"times": times.tobytes(), "counts": counts.tobytes(), "num_output_tokens": num}
    return msgspec.structs.replace(outcome, ended=told.ended, freed=told.ended, **seen)
