"""A rank without a model: it speaks the wire and samples one token after the other, so that only the engine works.

`front_door.py` starts it in place of `plait_worker`, with the same arguments. `MOCK_STEP_MS` is the time of a step. It
writes into the folder `MOCK_TIMES`, if given, when each step's plan came and when its result went.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import select
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zmq
from plait_proto import (
    IS_LAST_CHUNK,
    PROTOCOL,
    SCHEMA_FINGERPRINT,
    Bye,
    Drain,
    Fail,
    Heartbeat,
    Hello,
    Message,
    Plan,
    StepResult,
    Welcome,
    config_fingerprint,
    decode,
    decode_config,
    encode,
)

HEARTBEAT_SECONDS = 0.5
NUM_PAGES = 1 << 16
FIRST_TOKEN, NUM_TOKENS = 40, 40
"""Ids that are sampled in turn: printable in the check models, and none that ends an answer."""

Ids = npt.NDArray[np.uint32]


class MockRank:
    """One rank."""

    def __init__(self, endpoint: str, rank: int, config: Path, step_seconds: float) -> None:
        self._raw = config.read_bytes()
        self._config = decode_config(self._raw)
        self._rank = rank
        self._step_seconds = step_seconds
        self._due: collections.deque[tuple[float, Plan]] = collections.deque()
        self._num_steps = 0
        self._arrivals: list[tuple[int, float]] = []
        """Steps, and seconds of CLOCK_MONOTONIC."""
        self._sends: list[tuple[int, float]] = []
        """Sampled ids, and when they were sent."""
        self._socket = zmq.Context().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, f"rank-{rank}".encode())
        self._socket.connect(endpoint)

    def run(self) -> None:
        """Serve until the engine drains, fails or is gone."""
        self._send(self._hello())
        parent, next_beat = os.getppid(), 0.0
        while os.getppid() == parent:
            now = time.monotonic()
            if now >= next_beat:
                self._send(Heartbeat(rank=self._rank, step=self._num_steps))
                next_beat = now + HEARTBEAT_SECONDS
            due = min(next_beat, self._due[0][0]) if self._due else next_beat
            if self._has_mail(due - now) and not self._receive():
                return
            self._answer_due()

    def _has_mail(self, seconds: float) -> bool:
        """Whether a message came within the time; `poll` counts in milliseconds, and steps may be shorter."""
        if not self._socket.poll(0) and seconds > 0:
            select.select([self._socket.FD], [], [], seconds)
        return bool(self._socket.poll(0))

    def _hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL,
            schema=SCHEMA_FINGERPRINT,
            config=config_fingerprint(self._raw),
            rank=self._rank,
            world=self._config.parallel.num_ranks,
            pid=os.getpid(),
            device="mock",
            dtype="none",
            num_pages=self._config.pages.num_pages or NUM_PAGES,
            page_bytes=1,
            weight_bytes=0,
        )

    def _receive(self) -> bool:
        """Take one message; False at the end."""
        message = decode(self._socket.recv_multipart())
        if isinstance(message, Drain):
            self._send(Bye(rank=self._rank, num_steps=self._num_steps))
            self._write_times()
            self._socket.close(linger=1000)
        elif isinstance(message, Plan):
            self._arrivals.append((message.step, time.monotonic()))
            begins = max([time.monotonic(), *(at for at, _ in self._due)])
            self._due.append((begins + self._step_seconds, message))
        elif not isinstance(message, Welcome | Fail):
            raise TypeError(f"the engine sent {message}")
        return not isinstance(message, Drain | Fail)

    def _write_times(self) -> None:
        if folder := os.environ.get("MOCK_TIMES"):
            for name, times in (("arrivals", self._arrivals), ("sends", self._sends)):
                (Path(folder) / f"{name}-{self._rank}.json").write_text(json.dumps(times))

    def _answer_due(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            _, plan = self._due.popleft()
            self._num_steps += 1
            if plan.step == 0 or self._rank % self._config.parallel.world == 0:
                result = self._result(plan)
                self._sends.append((self._sampled, time.monotonic()))
                self._send(result)

    @property
    def _sampled(self) -> int:
        """The id that every row of the latest step samples."""
        return FIRST_TOKEN + self._num_steps % NUM_TOKENS

    def _result(self, plan: Plan) -> StepResult:
        rows: Ids = np.frombuffer(plan.rows, dtype="<u4")
        flags = rows[: 4 * plan.num_prefill].reshape(-1, 4)[:, 3]
        num_sampled = int(np.count_nonzero(flags & IS_LAST_CHUNK)) + plan.num_decode
        ids = np.full(num_sampled, self._sampled, dtype="<u4")
        return StepResult(
            step=plan.step,
            elapsed_us=max(1, int(1e6 * self._step_seconds)),
            num_accepted=np.ones(num_sampled, dtype="<u4").tobytes(),
            token_ids=ids.tobytes(),
            logprobs=b"",
            prompt_logprobs=b"",
        )

    def _send(self, message: Message) -> None:
        self._socket.send_multipart(encode(message))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connect", required=True)
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--kernel-cache")
    options = parser.parse_args()
    step_seconds = float(os.environ.get("MOCK_STEP_MS", "0")) / 1e3
    MockRank(options.connect, options.rank, options.config, step_seconds).run()


if __name__ == "__main__":
    main()
