"""The worker's end of the wire, in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from threading import Semaphore

import pytest
from plait_proto import Bye, Plan, StepMasks, StepResult, encode
from plait_testing.engine_side import EngineSide, engine_side
from plait_testing.stepper import words
from plait_worker import link as worker_link
from plait_worker.errors import WorkerError
from plait_worker.link import Link

NUM_PLANS = 12_000
LOOKS_BETWEEN = 3
# So short that it is often over before the wait has begun, as 50 us are where others want the processor too.
POLL_SECONDS = 1e-7


@pytest.fixture
def engine() -> Iterator[EngineSide]:
    with engine_side() as side:
        yield side


class Busy:
    """A step under way whose plan's successor comes after a few looks at the step's end."""

    def __init__(self, engine: EngineSide) -> None:
        self._engine = engine
        self._looks = 0
        self.num_sent = 0

    def next_look(self) -> float:
        self._looks += 1
        if self._looks == LOOKS_BETWEEN:
            self.num_sent += 1
            self._engine.send(Plan(self.num_sent, 0, 1, (), None, words([0, 0]), b"", b"", b""))
        return POLL_SECONDS

    def took(self, plan: Plan | StepMasks) -> None:
        assert plan.step == self.num_sent
        self._looks = 0


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """The thread that looks again and again would hold each of the others up for 5 ms."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("quick_switches")
def test_a_busy_worker_looks_again_and_again_however_late_each_wait_ends(engine: EngineSide) -> None:
    link, busy = Link(engine.endpoint, rank=0), Busy(engine)
    try:
        link.send(encode(StepResult(0, 0, b"", b"", b"", b"")))
        engine.expect(StepResult)
        plans = link.messages(busy.next_look)
        for _ in range(NUM_PLANS):
            busy.took(next(plans))
    finally:
        link.close()
    assert busy.num_sent == NUM_PLANS


@pytest.mark.process
def test_an_engine_that_hangs_up_after_the_last_word_ends_nothing(
    engine: EngineSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the rank takes to close its own end."""
    ended, looks = list[WorkerError](), Semaphore(0)
    monkeypatch.setattr(worker_link, "_COMEBACK_SECONDS", 0.0)
    monkeypatch.setattr(worker_link, "_HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(worker_link, "_end_process", ended.append)
    monkeypatch.setattr(worker_link._Wire, "_heartbeat", lambda _wire: looks.release())
    link = Link(engine.endpoint, rank=0)
    link.send(encode(Bye(rank=0, num_steps=0)))
    engine.expect(Bye)
    engine.hang_up()
    for _ in range(20):
        assert looks.acquire(timeout=60)
    link.close()
    assert ended == []
