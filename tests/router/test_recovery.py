"""What follows when a replica's ranks are lost: its launcher's part, without ranks."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plait.launch.kept_files import KeptFiles
from plait.launch.recovery import Recovery
from plait.launch.spares import Spares
from plait.restarts import Policy, RestartBudget
from plait_proto import WorkerConfig, decode_config, encode_config
from plait_testing.tiny_models import config_for


class LostEngine:
    """An engine whose only replica has lost its ranks."""

    def __init__(self, restart_ranks: Callable[[], str]) -> None:
        self.reasons: asyncio.Queue[str] = asyncio.Queue()
        """Why it was given up."""
        self.restarts: asyncio.Queue[int] = asyncio.Queue()
        self._restart_ranks = restart_ranks

    def status(self) -> bytes:
        same = {"phase": "ready", "reason": "it was killed", "exit_code": 0, "step": 1}
        same |= {"stuck": False, "late": False, "hung": False, "down": True, "losses": 1, "num_pages": 9}
        return msgspec.json.encode(same | {"replicas": [same]})

    def restart_ranks(self, replica: int, fingerprint: bytes) -> str:
        self.restarts.put_nowait(replica)
        return self._restart_ranks()

    def give_up(self, replica: int, why: str) -> None:
        self.reasons.put_nowait(why)


class NoRanks:
    """The processes of a replica that is on no machine."""

    num_ranks = 0
    environment = None

    def __init__(self, ended: Callable[[], Any]) -> None:
        self.configs: asyncio.Queue[bytes] = asyncio.Queue()
        """What the files hold that new ranks are to read."""
        self._ended = ended

    def of_replica(self, number: int) -> list[NoRanks]:
        return [self]

    async def end_after_failure(self, seconds: float) -> None:
        await self._ended()

    def restart(self, number: int, endpoint: str, config: Path, spares: Spares) -> Iterator[Any]:
        self.configs.put_nowait(config.read_bytes())
        return iter(())


class NoStreams:
    def comment(self) -> None:
        pass


async def at_once() -> None:
    pass


def settings(folder: Path) -> WorkerConfig:
    return config_for(folder, folder, num_pages=9)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def recovery_of(
    engine: LostEngine,
    model: Path,
    budget: RestartBudget | None = None,
    ended: Callable[[], Any] = at_once,
    ranks: NoRanks | None = None,
) -> Recovery:
    config = model.parent / "worker.json"
    config.write_bytes(encode_config(settings(model)))
    parts: list[Any] = [
        engine,
        ranks or NoRanks(ended),
        NoStreams(),
        budget or RestartBudget("group", 5, None),
        model,
        config,
    ]
    return Recovery(*parts)


async def outcome(recovery: Recovery, queue: asyncio.Queue[Any]) -> Any:
    """The first entry of `queue` while `recovery` watches."""
    watch = asyncio.create_task(recovery.watch(lambda worker: None))
    try:
        return await asyncio.wait_for(queue.get(), 60)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


def test_a_restart_that_fails_ends_the_streams_instead_of_leaving_them(model: Path) -> None:
    def fail() -> str:
        raise RuntimeError("a bug")

    async def why() -> Any:
        engine = LostEngine(fail)
        return await outcome(recovery_of(engine, model), engine.reasons)

    assert asyncio.run(why()) == "its ranks cannot be started again: RuntimeError: a bug"


@pytest.mark.parametrize("name", ["README.md", "notes.json", "adapter.safetensors", "run.log"])
def test_a_new_file_that_no_rank_reads_keeps_nobody_from_restarting(model: Path, name: str) -> None:
    async def restarted() -> Any:
        engine = LostEngine(lambda: "ipc:///new")
        recovery = recovery_of(engine, model)
        (model / name).write_text("new")
        return await outcome(recovery, engine.restarts)

    assert asyncio.run(restarted()) == 0


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_file_that_ranks_read_must_be_as_it_was(model: Path, name: str) -> None:
    async def why() -> Any:
        engine = LostEngine(lambda: "ipc:///new")
        recovery = recovery_of(engine, model)
        (model / name).write_text("changed")
        return await outcome(recovery, engine.reasons)

    assert asyncio.run(why()) == f"{model / name} has changed since the server started: start the server again"


def test_ranks_start_again_though_the_restart_file_cannot_be_written(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def restarted() -> Any:
        engine = LostEngine(lambda: "ipc:///new")
        budget = without_folder("group", 5, model.parent / "gone")
        return await outcome(recovery_of(engine, model, budget), engine.restarts)

    assert asyncio.run(restarted()) == 0
    assert "cannot be written: No such file or directory; losses are counted in memory only" in capsys.readouterr().out


def test_ranks_start_again_though_the_disk_of_the_run_directory_is_full(model: Path) -> None:
    async def read() -> Any:
        ranks = NoRanks(at_once)
        recovery = recovery_of(LostEngine(lambda: "ipc:///new"), model, ranks=ranks)
        (model.parent / "worker-0.json").mkdir()  # cannot be written, by root neither
        return await outcome(recovery, ranks.configs)

    assert decode_config(asyncio.run(read())) == settings(model)


def test_a_file_that_is_kept_in_memory_is_written_again_by_the_same_descriptor(tmp_path: Path) -> None:
    kept = KeptFiles()
    first = kept.write(tmp_path, b"a longer one")
    assert kept.write(tmp_path, b"short") == first
    assert subprocess.run(["cat", first], capture_output=True, check=True).stdout == b"short"


def without_folder(policy: Policy, budget: int, folder: Path) -> RestartBudget:
    """A budget whose file could be written at the start, and cannot be any more."""
    folder.mkdir()
    made = RestartBudget(policy, budget, str(folder / "restarts"), model="m")
    shutil.rmtree(folder)
    return made


def test_losses_count_though_the_restart_file_cannot_be_written(tmp_path: Path) -> None:
    budget = without_folder("group", 2, tmp_path / "gone")
    assert [budget.after_loss(5, float(now)) for now in range(3)] == [0.0, 0.0, None]


def test_no_rank_starts_once_the_server_ends(model: Path) -> None:
    async def run() -> None:
        engine, is_ending, may_end = LostEngine(lambda: "ipc:///new"), asyncio.Event(), asyncio.Event()

        async def ended() -> None:
            is_ending.set()
            await may_end.wait()

        watch = asyncio.create_task(recovery_of(engine, model, ended=ended).watch(lambda worker: None))
        await asyncio.wait_for(is_ending.wait(), 60)
        may_end.set()  # the restart goes on in the very turn of the loop in which the server ends
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert engine.restarts.empty()

    asyncio.run(run())


def test_a_spare_that_was_killed_becomes_no_rank(tmp_path: Path) -> None:
    spares = Spares(1)
    spares.fill()
    [spare] = spares.pids
    os.kill(spare, signal.SIGKILL)
    os.waitid(os.P_PID, spare, os.WEXITED | os.WNOWAIT)
    assert spares.take(0, "ipc:///new", tmp_path / "worker.json") is None
    assert spares.pids == []


def test_a_spare_that_was_killed_is_replaced() -> None:
    spares = Spares(2)
    spares.fill()
    killed, kept = spares.pids
    os.kill(killed, signal.SIGKILL)
    os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
    spares.fill()
    try:
        assert len(spares.pids) == 2
        assert kept in spares.pids
        assert killed not in spares.pids
        assert not Path(f"/proc/{killed}").exists()
    finally:
        spares.end()


def test_spares_end_with_the_server() -> None:
    spares = Spares(2)
    spares.fill()
    pids = spares.pids
    spares.end()
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
