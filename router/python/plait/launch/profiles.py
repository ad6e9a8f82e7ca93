"""Profiles of the ranks on this host: an order to all of them, and what they say of it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from plait_proto import ProfileOrder, RankProfile
from plait_proto.profiles import create_number, read_rank_profile, write_order

from plait.errors import SettingsError
from plait.http.admin_answers import MissingTrace, RankTrace
from plait.http.admin_profile import Profile
from plait.http.engine import EngineHandle, ReplicaStatus, Status, read_status
from plait.http.errors import ApiError
from plait.settings import ServeSettings

POLL_SECONDS = 0.05
WRITE_SECONDS = 120.0
"""From a profile's end to its trace."""
RATE_SECONDS = 0.05
"""In which the steps of each replica are counted."""
STEPS_AHEAD = 8
"""From the last step whose result is in to the first that is profiled, and twice those counted: two may be on the wire,
and an order may be late on a busy machine. Ranks that see it in time profile the same steps."""


def profile_folder(settings: ServeSettings) -> Path | None:
    """The folder for traces, made if it is not there; raises `SettingsError` if it cannot be used."""
    given = settings.admin.profile_dir
    if given is None:
        return None
    if settings.admin.admin_port is None:
        raise SettingsError("--profile-dir needs --admin-port, where profiles are asked for; give both or neither")
    if settings.hosts.rank_hosts > 1 or (settings.group.group_engines > 1 and settings.process.dp_attention):
        raise SettingsError(
            "--profile-dir is for ranks that are all of this engine and on this host: others would wait for those that "
            "write traces; leave it out"
        )
    folder = Path(given).absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--profile-dir is {given!r}: {error}; give a folder that can be written") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsError(f"--profile-dir is {given!r}, which cannot be written; give a folder that can be")
    return folder


class RankProfiles:
    """Takes profiles, one at a time."""

    def __init__(self, engine: EngineHandle, settings: ServeSettings, folder: Path, run_dir: Path) -> None:
        """Call it before the ranks start: they look for the file that it makes."""
        self._engine, self._folder, self._run_dir = engine, folder, run_dir
        self._ranks_each, self._num_ranks = settings.process.tp, settings.process.tp * settings.process.dp
        self._steps_together = settings.process.dp_attention
        self._num_orders = 0
        self.is_taken = False
        create_number(run_dir)

    async def take(self, num_steps: int, deadline_seconds: float) -> Profile:
        """See `plait.http.admin_profile.Profiles`."""
        if self.is_taken:
            raise ApiError(409, "a profile is under way; wait for its answer, and ask again")
        self.is_taken = True
        try:
            return await self._take(num_steps, deadline_seconds)
        finally:
            self.is_taken = False
            self._give()

    async def _take(self, num_steps: int, seconds: float) -> Profile:
        before = status = read_status(self._engine)
        if not all(replica.idle for replica in before.replicas):
            await asyncio.sleep(RATE_SECONDS)
            status = read_status(self._engine)
        begun = _Begun(_name(), tuple(replica.losses - replica.down for replica in status.replicas))
        first_steps = tuple(first_steps_of(before.replicas, status.replicas, self._steps_together))
        self._give(begun.name, first_steps, num_steps)
        said = await self._wait(begun, {"waiting", "running"}, seconds)
        has_timed_out = any(one.state in ("waiting", "running") for one in said)
        if has_timed_out:
            self._give()
            await asyncio.sleep(POLL_SECONDS)
            said = await self._wait(begun, {"running"}, WRITE_SECONDS)
        traces, missing = self._traces(said), self._missing(said, f"computed none of the steps within {seconds:g} s")
        return Profile(
            folder=str(self._folder), traces=list(traces), missing=list(missing), has_timed_out=has_timed_out
        )

    def _give(self, name: str = "", first_steps: tuple[int, ...] = (), num_steps: int = 0) -> None:
        """Without steps it ends what runs."""
        self._num_orders += 1
        order = ProfileOrder(
            number=self._num_orders,
            name=name,
            folder=str(self._folder),
            first_steps=first_steps,
            num_steps=num_steps,
        )
        try:
            write_order(self._run_dir, order)
        except OSError as error:
            raise ApiError(503, f"the ranks cannot be told: {error}; free space in {self._run_dir.parent}") from error

    async def _wait(self, begun: _Begun, states: set[str], seconds: float) -> list[RankProfile]:
        """What each rank says, once none is in one of the states, or the time is over."""
        deadline = time.monotonic() + seconds
        while True:
            status = read_status(self._engine)
            said = [self._says(rank, begun, status) for rank in range(self._num_ranks)]
            if time.monotonic() >= deadline or all(one.state not in states for one in said):
                return said
            await asyncio.sleep(POLL_SECONDS)

    def _says(self, rank: int, begun: _Begun, status: Status) -> RankProfile:
        said = read_rank_profile(self._run_dir, rank)
        if said is None or said.name != begun.name:
            said = RankProfile(name=begun.name, state="waiting")
        number = self._replica(rank)
        replica = status.replicas[number]
        is_lost = replica.losses > begun.losses[number] or "failed" in (replica.phase, status.phase)
        if said.state in ("waiting", "running") and (is_lost or status.phase == "stopped"):
            why = f"was lost: {replica.reason}" if is_lost else "ended with the server"
            return RankProfile(name=begun.name, state="failed", reason=why)
        return said

    def _replica(self, rank: int) -> int:
        return rank // self._ranks_each

    def _traces(self, said: list[RankProfile]) -> Iterator[RankTrace]:
        for rank, one in enumerate(said):
            if one.state == "written":
                first, count = one.first_step, one.num_steps
                replica = self._replica(rank)
                yield RankTrace(rank=rank, replica=replica, file=one.file, first_step=first, num_steps=count)

    def _missing(self, said: list[RankProfile], no_steps: str) -> Iterator[MissingTrace]:
        reasons = {"waiting": no_steps, "running": f"did not write its trace within {WRITE_SECONDS:g} s"}
        for rank, one in enumerate(said):
            if one.state != "written":
                why = reasons.get(one.state, one.reason)
                yield MissingTrace(rank=rank, replica=self._replica(rank), reason=why)


class _Begun(NamedTuple):
    """A profile that was ordered."""

    name: str
    losses: tuple[int, ...]
    """Of each replica until then."""


def first_steps_of(before: Sequence[ReplicaStatus], now: Sequence[ReplicaStatus], step_together: bool) -> Iterator[int]:
    """The first step of a profile in each replica. An idle replica begins with its next one."""
    each = [_first_step(old, new) for old, new in zip(before, now, strict=True)]
    return iter([max(each)] * len(each) if step_together else each)


def _first_step(before: ReplicaStatus, now: ReplicaStatus) -> int:
    return now.step + (1 if now.idle else STEPS_AHEAD + 2 * max(0, now.step - before.step))


def _name() -> str:
    return f"plait-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"
