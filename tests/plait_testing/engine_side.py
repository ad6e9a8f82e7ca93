"""The engine's side of the wire, small enough that a test drives a worker by hand."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import zmq
from plait_proto import (
    Fail,
    Heartbeat,
    Hello,
    Message,
    Plan,
    StepResult,
    Welcome,
    WorkerConfig,
    decode,
    encode,
    encode_config,
)

from plait_testing.stepper import Stepper

M = TypeVar("M", bound=Message)

NUM_SLOTS = 8


class EngineSide:
    """A ROUTER socket in a folder of its own, and the worker processes that dial it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.endpoint = f"ipc://{folder}/engine"
        self.num_heartbeats = 0
        """Arrival times in seconds of CLOCK_MONOTONIC."""
        self.processes: list[subprocess.Popen[str]] = []
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.bind(self.endpoint)

    def start(self, config: WorkerConfig, *more: str, rank: int = 0) -> subprocess.Popen[str]:
        """A worker process on this configuration, with ``more`` arguments after its own."""
        path = self.folder / f"config-{rank}.json"
        path.write_bytes(encode_config(config))
        words = ["--connect", self.endpoint, "--rank", str(rank), "--config", str(path), *more]
        process = subprocess.Popen(
            [sys.executable, "-m", "plait_worker", *words],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def send(self, message: Message, rank: int = 0) -> None:
        self.send_frames(encode(message), rank)

    def send_frames(self, frames: list[bytes], rank: int = 0) -> None:
        self._router.send_multipart([f"rank-{rank}".encode(), *frames])

    def send_when_dialled(self, message: Message, seconds: float = 60) -> None:
        """To a worker that may not have dialled yet."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return self.send(message)
            except zmq.ZMQError:
                assert time.monotonic() < deadline, "the worker does not dial"
                time.sleep(0.05)

    def expect(self, kind: type[M], seconds: float = 120) -> M:
        """The next message but Heartbeats, which must be of this kind."""
        message = self.receive(seconds)
        assert isinstance(message, kind), message
        return message

    def receive(self, seconds: float = 120) -> Message:
        deadline = time.monotonic() + seconds
        while self._router.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            message = decode(self._router.recv_multipart()[1:])
            if not isinstance(message, Heartbeat):
                return message
            self.num_heartbeats += 1
        raise TimeoutError(f"no message from the worker in {seconds} s")

    def greet(self, config: WorkerConfig, num_pages: int = 64) -> tuple[Hello, Stepper]:
        """Start rank 0, answer its Hello, run the warm-up; a stepper over it."""
        self.start(config)
        hello = self.expect(Hello)
        self.send(welcome(num_pages))
        self.send(warm_up())
        assert self.expect(StepResult).step == 0
        return hello, Stepper(self.compute, config.pages.page_size, num_pages)

    def compute(self, plan: Plan) -> StepResult:
        self.send(plan)
        return self.expect(StepResult)

    def ending(self) -> tuple[int, str]:
        """Wait for rank 0 to end: its exit code and standard error."""
        _, errors = self.processes[0].communicate(timeout=180)
        return self.processes[0].returncode, errors

    def failure(self) -> tuple[Fail, int, str]:
        """What rank 0 said before it ended, its exit code and standard error."""
        return self.expect(Fail), *self.ending()

    def hang_up(self) -> None:
        """Close the socket."""
        self._router.close()

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self._router.close()
        self._context.term()


@contextmanager
def engine_side() -> Iterator[EngineSide]:
    """An engine side whose folder has a short path: ipc names end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="plait-") as folder:
        engine = EngineSide(Path(folder))
        try:
            yield engine
        finally:
            engine.close()


def welcome(num_pages: int) -> Welcome:
    return Welcome(
        num_slots=NUM_SLOTS,
        num_pages=num_pages,
        max_batch_tokens=2048,
        max_rows=NUM_SLOTS,
        replica=0,
        num_replicas=1,
        credit=2,
    )


def warm_up() -> Plan:
    """Step 0 as the contract has it: slot 0, one page, one last chunk of two tokens."""
    plans: list[Plan] = []

    def keep(plan: Plan) -> StepResult:
        plans.append(plan)
        return StepResult(
            step=0, elapsed_us=0, num_accepted=b"\1\0\0\0", token_ids=bytes(4), logprobs=b"", prompt_logprobs=b""
        )

    stepper = Stepper(keep, page_size=64, num_pages=1, first_step=0)
    stepper.step(prefill={stepper.admit([0, 1]): 2})
    return plans[0]
