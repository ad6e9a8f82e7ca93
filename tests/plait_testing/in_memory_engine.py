"""The engine's side of the front door, in memory: tests say what it sends and see what it got."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable

import msgspec

LAST = 1
ERROR = 2
TOO_SLOW = 4
GONE = 8


def record(stream: int, payload: bytes, flags: int = 0) -> bytes:
    return struct.pack("<QBI", stream, flags, len(payload)) + payload


def failure(stream: int, status: int, body: bytes, retry_after_seconds: int = 0) -> bytes:
    return record(stream, struct.pack("<HH", status, retry_after_seconds) + body, LAST | ERROR)


class InMemoryEngine:
    """Keeps what was submitted and aborted; `send` makes records readable on a real eventfd."""

    def __init__(self) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.submitted: dict[int, dict[str, object]] = {}
        self.tenants: dict[int, int] = {}
        self.aborted: list[int] = []
        self.phase = "ready"
        self.stuck = False
        self.late = False
        self.hung = False
        self.down = False
        self.replicas: list[str] = []
        """The phase of each, if there are several."""
        self.num_takes = 0
        self._outbox = b""
        self._changed = threading.Condition()

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        """Wait until something was submitted or aborted; raises `TimeoutError`."""
        with self._changed:
            if not self._changed.wait_for(is_there, timeout=60):
                raise TimeoutError

    def close(self) -> None:
        os.close(self.event_fd)

    def send(self, *records: bytes) -> None:
        with self._changed:
            self._outbox += b"".join(records)
        os.eventfd_write(self.event_fd, 1)

    def submit(self, stream: int, tenant: int, request: bytes) -> None:
        with self._changed:
            self.submitted[stream] = msgspec.json.decode(request)
            self.tenants[stream] = tenant
            self._changed.notify_all()

    def submit_text(self, stream: int, tenant: int, call: bytes) -> None:
        self.submit(stream, tenant, call)

    def abort(self, stream: int) -> None:
        with self._changed:
            self.aborted.append(stream)
            self._changed.notify_all()

    def take(self) -> bytes:
        os.eventfd_read(self.event_fd)
        self.num_takes += 1
        with self._changed:
            taken, self._outbox = self._outbox, b""
        return taken

    def status(self) -> bytes:
        alarms = {"stuck": self.stuck, "late": self.late, "hung": self.hung, "down": self.down}
        same = {"reason": "", "exit_code": 0, "step": 9} | alarms
        replicas = [{"phase": phase} | same for phase in self.replicas]
        return msgspec.json.encode({"phase": self.phase, "replicas": replicas} | same)

    def describe(self) -> bytes:
        return msgspec.json.encode({"model_id": "tiny", "architecture": "llama", "max_model_len": 64})

    def metrics(self) -> bytes:
        return b"# EOF\n"
