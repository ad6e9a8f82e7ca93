"""What the nodes' launchers say to each other, as tagged MessagePack."""

from __future__ import annotations

import msgspec
from plait_proto import StoreReply, StoreRequest
from plait_proto.all_reduce_check import Reduced


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """Of what computes or speaks on a node."""

    plait: str
    python: str
    torch: str
    """Empty if it is not installed."""


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a node."""

    path: str
    files: dict[str, tuple[int, str]]
    """Size and, for small texts, digest, by name."""
    problem: str = ""
    """Why it cannot be used."""

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that ranks may take."""

    name: str
    driver: str
    free_bytes: int
    index: int = 0
    """As nvidia-smi counts."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has."""

    gpus: tuple[Gpu, ...]
    """Those that its ranks may take."""
    without_peer_access: tuple[tuple[int, int], ...] = ()
    """Pairs of them that cannot read each other's memory."""
    free_bytes: int
    """Of memory."""
    shm_bytes: int
    """Size of /dev/shm."""
    memlock_bytes: int | None
    """Most memory that a process may lock; None: no limit."""
    open_files: int
    """The hard limit of a process."""
    taken_ports: tuple[str, ...]
    """Ports that the node needs and cannot open, with the reason."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a node tells of itself before anything heavy loads."""

    node: int
    host: str
    address: str
    address_reason: str
    session: str
    """Drawn at each start: two nodes with one number differ in it."""
    versions: Versions
    settings: dict[str, str]
    """Flags that must be equal on all nodes, with their values."""
    model: ModelFiles
    machine: Machine
    probe_port: int
    """Where the node answers the others' probes."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why a node ends."""

    code: int
    """Exit code; 0: it drained."""
    reason: str
    is_report: bool = False
    """A rank's own word that another one, or its engine, is gone: a consequence of something else."""


class Join(msgspec.Struct, frozen=True, tag=True):
    """A node is there."""

    facts: Facts


class ClockTick(msgspec.Struct, frozen=True, tag=True):
    """The head asks for the node's wall clock, or the node answers with it."""

    seconds: float


class Probe(msgspec.Struct, frozen=True, tag=True):
    """The head asks the node to reach these."""

    targets: dict[int, tuple[str, int]]
    """Address and port by node."""


class Probed(msgspec.Struct, frozen=True, tag=True):
    """How that went: None by node, or why the node cannot be reached."""

    problems: dict[int, str | None]


class ReduceAll(msgspec.Struct, frozen=True, tag=True):
    """The head asks the node to take part in an all-reduce."""


class StoreAsked(msgspec.Struct, frozen=True, tag=True):
    """The node's part of the all-reduce asks the head's store."""

    request: StoreRequest


class StoreAnswered(msgspec.Struct, frozen=True, tag=True):
    """The answer."""

    reply: StoreReply


class HasReduced(msgspec.Struct, frozen=True, tag=True):
    """How the all-reduce went, as the node sees it."""

    reduced: Reduced


class Load(msgspec.Struct, frozen=True, tag=True):
    """The preflight is passed: start the engine."""


class StartRanks(msgspec.Struct, frozen=True, tag=True):
    """The head's engine listens for this node's ranks: start them."""

    config: bytes
    """The workers' configuration; its fingerprint is part of their handshake."""
    endpoints: tuple[str, ...]
    """Where the ranks of each replica connect."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The node's engine takes requests."""


class Lines(msgspec.Struct, frozen=True, tag=True):
    """Log lines for the combined log."""

    lines: list[str]
    num_dropped: int = 0


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The node's engine has ended, or the node cannot go on."""

    cause: Cause


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Somebody asks all nodes to drain."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """All nodes end now."""

    cause: Cause
    restart_after: float | None = None
    """Seconds until all nodes meet again; None: they do not."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The node is alive."""


Message = (
    Join
    | ClockTick
    | Probe
    | Probed
    | ReduceAll
    | StoreAsked
    | StoreAnswered
    | HasReduced
    | Load
    | StartRanks
    | Ready
    | Lines
    | Ended
    | Drain
    | Stop
    | Alive
)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
"""Raises one of `UNDECODABLE` for anything else."""
