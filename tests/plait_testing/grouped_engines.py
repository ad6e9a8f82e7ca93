"""Engines of one group on one host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait_testing.running_server import Server, spawn_server, wait_until_ready


def spawn_engines(
    folder: Path, model: Path, num_engines: int, *flags: str, engines: Sequence[int] | None = None
) -> list[Server]:
    """Engines, all by default, that meet in a directory below ``folder``; they load and are not ready yet."""
    meeting = folder / "group"
    meeting.mkdir(mode=0o700, exist_ok=True)
    started = []
    for engine in range(num_engines) if engines is None else engines:
        place = [
            *("--group-engines", str(num_engines), "--group-engine", str(engine)),
            *("--group-endpoint", f"ipc://{meeting}/votes"),
        ]
        words = ["-m", "plait.cli", "serve", str(model), "--port", "0", "--threads", "1", *place, *flags]
        started.append(spawn_server(folder / f"engine-{engine}.log", *words))
    return started


def start_engines(folder: Path, model: Path, num_engines: int, *flags: str) -> list[Server]:
    """The same, ready."""
    started = spawn_engines(folder, model, num_engines, *flags)
    for one in started:
        wait_until_ready(one)
        assert one.url, one.errors
    return started
