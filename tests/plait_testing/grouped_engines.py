"""Engines of one group on one host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq

from plait_testing.held_port import held_port
from plait_testing.running_server import Server, spawn_server, wait_until_ready


@dataclass(frozen=True)
class GroupFlags:
    """Where engines meet, and with which keys."""

    endpoint: str
    key_files: Sequence[tuple[Path, Path]] = ()
    """Secret key and public keys of each engine."""

    def of(self, engine: int, num_engines: int) -> list[str]:
        """An engine's flags."""
        words = ["--group-engines", str(num_engines), "--group-engine", str(engine), "--group-endpoint", self.endpoint]
        if self.key_files:
            secret, public = self.key_files[engine]
            words += ["--group-secret-key-file", str(secret), "--group-public-keys-file", str(public)]
        return words


def over_ipc(folder: Path) -> GroupFlags:
    """In a directory below ``folder``."""
    meeting = folder / "group"
    meeting.mkdir(mode=0o700, exist_ok=True)
    return GroupFlags(f"ipc://{meeting}/votes")


@contextmanager
def over_tcp(folder: Path, num_engines: int) -> Iterator[GroupFlags]:
    """On loopback, with CURVE."""
    pairs = [zmq.curve_keypair() for _ in range(num_engines)]
    public = folder / "public.keys"
    public.write_text("".join(pair[0].decode() + "\n" for pair in pairs))
    files = []
    for engine, pair in enumerate(pairs):
        secret = folder / f"secret-{engine}.key"
        secret.touch(mode=0o600)
        secret.write_text(pair[1].decode() + "\n")
        files.append((secret, public))
    with held_port() as port:
        yield GroupFlags(f"tcp://127.0.0.1:{port}", files)


def spawn_engines(
    folder: Path,
    model: Path,
    num_engines: int,
    *flags: str,
    engines: Sequence[int] | None = None,
    meet: GroupFlags | None = None,
) -> list[Server]:
    """Engines, all by default, that meet over ipc unless told otherwise; they load and are not ready yet."""
    meet = meet or over_ipc(folder)
    started = []
    for engine in range(num_engines) if engines is None else engines:
        place = meet.of(engine, num_engines)
        words = ["-m", "plait.cli", "serve", str(model), "--port", "0", "--threads", "1", *place, *flags]
        started.append(spawn_server(folder / f"engine-{engine}.log", *words))
    return started


def start_engines(
    folder: Path, model: Path, num_engines: int, *flags: str, meet: GroupFlags | None = None
) -> list[Server]:
    """The same, ready."""
    started = spawn_engines(folder, model, num_engines, *flags, meet=meet)
    for one in started:
        wait_until_ready(one)
        assert one.url, one.errors
    return started
