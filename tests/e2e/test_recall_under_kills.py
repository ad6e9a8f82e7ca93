"""Answers stay right while a worker is killed again and again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from plait_testing import recall
from plait_testing.metrics import read_metrics, sum_over_replicas
from plait_testing.model_mistakes import record_answers
from plait_testing.recording import Record
from plait_testing.running_server import Server, StartServer

CONTEXT, REDUCED_CONTEXT = 2048, 512
CONCURRENCY = 8
EVERY_SECONDS, REDUCED_SECONDS = 20.0, 2.0
NUM_KILLS, REDUCED_KILLS = 10, 2
FLAGS = ("--max-model-len", "4096", "--restart", "group", "--restart-budget", "1000")
LAYOUTS = {"one rank": (), "tp 2": ("--tp", "2"), "dp 2": ("--dp", "2")}
REDUCED = {("recall-gqa", "tp 2"), ("recall-mla", "dp 2")}


class Kills:
    """Kills a worker of a server time and again."""

    def __init__(self, running: Server, every: float) -> None:
        self._running, self._every = running, every
        self._draw = random.Random(5)
        self._over = threading.Event()
        self.num = 0

    def strike(self) -> None:
        while not self._over.wait(self._every):
            self._wait_for_answers(2 * CONCURRENCY)
            self._draw.choice(self._running.workers()).kill()
            self.num += 1
            self._wait_until(lambda: self._counts()["plait_rank_losses_total"] >= self.num)
            self._wait_until(lambda: self._counts()["plait_replica_down"] == 0)

    def end(self) -> None:
        self._over.set()

    def _wait_for_answers(self, num: int) -> None:
        """A request that is in flight at two losses, with no token between, is refused: let all of them end."""
        enough = self._num_answered() + num
        self._wait_until(lambda: self._num_answered() >= enough)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not is_so() and not self._over.is_set():
            assert time.monotonic() < deadline, self._running.errors
            time.sleep(0.05)

    def _counts(self) -> dict[str, float]:
        return sum_over_replicas(read_metrics(self._running.url))

    def _num_answered(self) -> float:
        counts = self._counts().items()
        return sum(value for name, value in counts if name.startswith("plait_requests_finished_total"))


@contextmanager
def killed(running: Server, every: float) -> Iterator[Kills]:
    """Let a worker be killed every so many seconds."""
    kills = Kills(running, every)
    with ThreadPoolExecutor(1) as pool:
        striking = pool.submit(kills.strike)
        try:
            yield kills
        finally:
            kills.end()
        striking.result()


@pytest.mark.acceptance("faults")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["recall-gqa", "recall-mla"])
def test_answers_are_right_while_workers_are_killed(
    model: str,
    layout: str,
    check_models: Path,
    server: StartServer,
    sized: Callable[[int, int], int],
    record: Record,
) -> None:
    num_kills = sized(REDUCED_KILLS if (model, layout) in REDUCED else 0, NUM_KILLS)
    if num_kills == 0:
        pytest.skip("at full size alone: other cases have these settings together")
    context = sized(REDUCED_CONTEXT, CONTEXT)
    running = server(check_models / model, *FLAGS, *LAYOUTS[layout])
    asked: list[recall.Problem] = []
    wrong: list[recall.Wrong] = []
    with killed(running, EVERY_SECONDS if num_kills == NUM_KILLS else REDUCED_SECONDS) as kills:
        # The last ones are asked after the last kill.
        is_last = False
        while not is_last:
            is_last = kills.num >= num_kills
            more = recall.problems(seed=len(asked), num=2 * CONCURRENCY, context=context)
            found = recall.ask_all(running.url, more, model=model, concurrency=CONCURRENCY)
            wrong += [recall.Wrong(one.index + len(asked), one.kind, one.expected, one.given) for one in found]
            asked += more
    case = f"{model} {context} {layout}, a worker killed every {EVERY_SECONDS:g} s"
    mistakes = record_answers(check_models / model, case, asked, wrong, record)
    record(case, "kills", "kills", kills.num)
    assert mistakes == []
    assert sum_over_replicas(read_metrics(running.url))["plait_rank_losses_total"] == kills.num >= num_kills
