"""A server with one replica whose ranks are started again, struck while all streams have a row in its step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.faults.streams import NUM_STREAMS, Stream, answers, ask
from plait_testing.held_steps import HeldSteps
from plait_testing.running_server import Server, start_server

RECALL = Path(__file__).resolve().parents[2] / "models" / "recall-gqa"
FLAGS = ("--threads", "1", "--max-model-len", "1024", "--dtype", "float32")
RESTART = ("--restart", "group", "--restart-budget", "1000")


@dataclass(frozen=True)
class HeldServer:
    """The server, and the answers that it gives without a fault."""

    running: Server
    steps: HeldSteps
    right: list[list[str]]

    def under_way(self) -> list[Stream]:
        """Streams whose next tokens are in a step that waits."""
        self.steps.begin(NUM_STREAMS)
        streams = ask(self.running.url)
        self.steps.wait_until_held(1)
        return streams


@contextmanager
def serving(folder: Path, *flags: str, log: Path | None = None) -> Iterator[Server]:
    """A server of the small model."""
    running = start_server(log or folder / "log", RECALL, *FLAGS, *flags)
    try:
        if not running.url:
            raise RuntimeError(f"the server did not start: {running.last_line}")
        yield running
    finally:
        running.kill()


@contextmanager
def held_server(folder: Path, *flags: str, log: Path | None = None) -> Iterator[HeldServer]:
    """One that keeps its files in the folder."""
    steps = HeldSteps(folder)
    with steps.of_servers(), serving(folder, *RESTART, *flags, log=log) as running:
        yield HeldServer(running, steps, answers(running.url))
