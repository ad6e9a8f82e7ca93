"""Profiles before any rank has one: where they go, and with which steps they begin."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest
from plait.admin_settings import AdminSettings
from plait.errors import SettingsError
from plait.http.engine import ReplicaStatus
from plait.http.errors import ApiError
from plait.launch.profiles import STEPS_AHEAD, RankProfiles, first_steps_of, profile_folder
from plait.settings import GroupSettings, HostSettings, ProcessSettings, ServeSettings
from plait_testing.in_memory_engine import InMemoryEngine


def settings(folder: Path | str | None, *, port: int | None = 0, **components: msgspec.Struct) -> ServeSettings:
    admin = AdminSettings(admin_port=port, profile_dir=None if folder is None else str(folder))
    return msgspec.structs.replace(ServeSettings(admin=admin), **components)


def replica(step: int, *, idle: bool = False) -> ReplicaStatus:
    return ReplicaStatus(
        phase="ready", reason="", exit_code=0, step=step, idle=idle, stuck=False, late=False, hung=False
    )


def test_the_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "traces"
    assert profile_folder(settings(folder)) == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert profile_folder(settings(folder)) == folder, "it is there already"
    assert profile_folder(settings(None)) is None


def test_a_folder_that_cannot_be_used_is_refused_with_its_flag(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", "/proc/traces"):
        with pytest.raises(SettingsError, match="give a folder that can be written"):
            profile_folder(settings(folder))


def test_it_needs_the_admin_listener(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--profile-dir needs --admin-port"):
        profile_folder(settings(tmp_path, port=None))


def test_ranks_that_others_wait_for_are_not_profiled(tmp_path: Path) -> None:
    group, together = GroupSettings(group_engines=2), ProcessSettings(dp_attention=True)
    for components in ({"hosts": HostSettings(rank_hosts=2)}, {"group": group, "process": together}):
        with pytest.raises(SettingsError, match="leave it out"):
            profile_folder(settings(tmp_path, **components))
    assert profile_folder(settings(tmp_path, group=group)) == tmp_path, "its replicas wait for no step of another's"


def test_a_profile_begins_as_far_ahead_as_steps_are_fast_or_with_an_idle_replicas_next() -> None:
    before, now = [replica(7), replica(7), replica(30)], [replica(7), replica(57), replica(31, idle=True)]
    assert list(first_steps_of(before, now, step_together=False)) == [7 + STEPS_AHEAD, 57 + STEPS_AHEAD + 100, 32]


def test_replicas_that_step_together_begin_together() -> None:
    now = [replica(7), replica(6, idle=True)]
    assert list(first_steps_of(now, now, step_together=True)) == [7 + STEPS_AHEAD] * 2
    idle = [replica(7, idle=True), replica(7, idle=True)]
    assert list(first_steps_of(idle, idle, step_together=True)) == [8, 8]


def test_ranks_that_cannot_be_told_are_an_error_and_the_next_profile_is_taken(tmp_path: Path) -> None:
    engine, run_dir = InMemoryEngine(), tmp_path / "run"
    engine.replicas = ["ready"]
    run_dir.mkdir()
    profiles = RankProfiles(engine, settings(tmp_path), tmp_path, run_dir)
    shutil.rmtree(run_dir)
    for _ in range(2):
        with pytest.raises(ApiError, match="free space in") as refused:
            asyncio.run(profiles.take(1, deadline_seconds=1))
        assert refused.value.status == 503
        assert not profiles.is_taken
    engine.close()
