"""The client processes of a run, seen from the benchmark."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Container, Iterable
from types import TracebackType

from plait_proto import ExitCode

from plait.bench.messages import Begin, Finish, Frames, FromClient, Go, Job, Outcome, Ready, Report, Setup, frame
from plait.errors import StartError

PIPE_BYTES = 1 << 20
REPORT_SECONDS = 10.0


class ClientPool:
    """Processes that send requests. A request's index decides which process sends it."""

    def __init__(self, num_processes: int) -> None:
        self._processes = [_start() for _ in range(num_processes)]
        self._frames = {process.stdout.fileno(): Frames() for process in self._processes if process.stdout is not None}

    def __enter__(self) -> ClientPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def load(self, setup: Setup, bodies: Iterable[bytes], kept: Container[int] = ()) -> None:
        """Give the processes their requests; returns when every process is ready.

        `kept` holds the indices of the requests whose token ids are wanted.
        """
        for process in self._processes:
            _write(process, frame(setup))
        for index, body in enumerate(bodies):
            _write(self._owner(index), frame(Job(index, body, index in kept)))
        for process in self._processes:
            _write(process, frame(Begin()))
        waiting = len(self._processes)
        while waiting:
            waiting -= sum(isinstance(message, Ready) for message in self.poll(None))

    def go(self, order: Go) -> None:
        """Order a request to be sent."""
        _write(self._owner(order.index), frame(order))

    def poll(self, timeout: float | None) -> list[FromClient]:
        """Messages that arrive within `timeout` seconds (None: wait for one); empty if none does."""
        readable, _, _ = select.select(list(self._frames), [], [], timeout)
        return [message for fd in readable for message in self._frames[fd].feed(_read(fd))]

    def finish(self) -> tuple[list[Report], list[Outcome]]:
        """The processes' reports, and outcomes that arrived while the run was being ended."""
        for process in self._processes:
            _write(process, frame(Finish()))
        reports: list[Report] = []
        late: list[Outcome] = []
        while len(reports) < len(self._processes):
            messages = self.poll(REPORT_SECONDS)
            if not messages:
                raise StartError("a client process does not answer", ExitCode.BUG)
            reports += [message for message in messages if isinstance(message, Report)]
            late += [message for message in messages if isinstance(message, Outcome)]
        return reports, late

    def _owner(self, index: int) -> subprocess.Popen[bytes]:
        return self._processes[index % len(self._processes)]


def _start() -> subprocess.Popen[bytes]:
    # -P: modules in the current folder must not shadow the client's.
    command = [sys.executable, "-P", "-m", "plait.bench.client"]
    # A session of its own: Ctrl-C reaches only this process, which then stops the clients.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True)


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    view = memoryview(data)
    try:
        while view:
            view = view[process.stdin.write(view) :]
    except BrokenPipeError:
        raise _client_gone_error() from None


def _read(fd: int) -> bytes:
    data = os.read(fd, PIPE_BYTES)
    if not data:
        raise _client_gone_error()
    return data


def _client_gone_error() -> StartError:
    return StartError("a client process ended by itself; its own lines are above", ExitCode.BUG)
