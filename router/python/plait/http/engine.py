"""The engine as the HTTP server sees it: `plait._router.Engine`, or a test's stand-in."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

Phase = Literal["loading", "ready", "draining", "stopped", "failed"]


class EngineHandle(Protocol):
    """See `_router.pyi` for what each does."""

    @property
    def event_fd(self) -> int:
        """Readable when `take` has something."""

    def submit(self, stream: int, tenant: int, request: bytes) -> None:
        """Queue a request."""

    def submit_text(self, stream: int, tenant: int, call: bytes) -> None:
        """Queue a call that generates nothing."""

    def abort(self, stream: int) -> None:
        """Stop the work for a stream that no client reads."""

    def take(self) -> bytes:
        """Everything that streams have to write."""

    def status(self) -> bytes:
        """`Status` as JSON."""

    def describe(self) -> bytes:
        """`Description` as JSON."""

    def metrics(self) -> bytes:
        """OpenMetrics text."""


class SocketWriter(Protocol):
    """Writes event streams to their sockets: `plait._router.Engine`. See `_router.pyi` for what each does."""

    def announce(self, stream: int, max_unsent_bytes: int) -> None:
        """An event stream whose socket may come; call it before the stream's `submit`."""

    def hand_over(self, stream: int, socket: int, write_seconds: float) -> None:
        """Write what follows the first record to the descriptor `socket`."""

    def release(self, stream: int) -> None:
        """Forget an announced stream."""

    def comment(self, comment: bytes) -> None:
        """Write bytes to all streams that were handed over."""


class SlotState(msgspec.Struct, frozen=True, kw_only=True):
    """What the model keeps for each slot beside its pages; bytes are summed over the ranks."""

    slot_bytes: int
    snapshot_bytes: int
    num_snapshots: int


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):  # budget: the engine's JSON, field for field
    """One replica in `Engine.status()`, and all of them together; see `_router.pyi`."""

    phase: Phase
    reason: str
    """A sentence when `failed`."""
    exit_code: int
    """Set when `failed`."""
    step: int
    """The last one whose result is in."""
    idle: bool = False
    """Nothing runs and nothing waits."""
    stuck: bool
    """A step is overdue."""
    late: bool
    """A rank's heartbeat is overdue."""
    hung: bool
    """The driver thread is a minute past its watchdog deadline."""
    paused: bool = False
    """An operator has paused it."""
    down: bool = False
    """The ranks were lost, and requests wait for others."""
    losses: int = 0
    """How often that was so."""
    ranks: int = 0
    """Those that have warmed up."""
    num_pages: int = 0
    page_bytes: int = 0
    weight_bytes: int = 0
    slot_state: SlotState | None = None
    device: str = ""
    dtype: str = ""


class Status(ReplicaStatus, frozen=True, kw_only=True):
    """`Engine.status()`; see `_router.pyi`."""

    replicas: tuple[ReplicaStatus, ...] = ()

    @property
    def failed_replicas(self) -> list[int]:
        """The numbers of those that failed."""
        return [number for number, replica in enumerate(self.replicas) if replica.phase == "failed"]


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """`Engine.describe()`; see `_router.pyi`."""

    model_id: str
    architecture: str
    max_model_len: int


def read_status(engine: EngineHandle) -> Status:
    """Where the engine stands now."""
    return msgspec.json.decode(engine.status(), type=Status)


def read_description(engine: EngineHandle) -> Description:
    """What the engine serves."""
    return msgspec.json.decode(engine.describe(), type=Description)
