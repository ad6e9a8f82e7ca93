"""Files in the run directory by which the engine's command line asks the ranks of its host for a profile.

The wire has no message for it: the engine's threads have no part in a profile, and a server without ``--profile-dir``
has none of these files. ``NUMBER`` holds the number of the newest order in eight bytes. Each rank maps it, and a step
reads it without a system call. ``ORDER`` holds that order, ``profile-rank-R`` what rank R says of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

NUMBER = "profile-number"
NUMBER_BYTES = 8
ORDER = "profile-order"


class ProfileOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Profile some steps, the same on all ranks of a replica."""

    number: int
    """Orders are counted from 1."""
    name: str
    """The beginning of each trace's file name."""
    folder: str
    """Of the traces; an absolute path."""
    first_steps: tuple[int, ...]
    """The number from which on the steps of each replica count."""
    num_steps: int
    """0 begins nothing: ranks that profile write what they have."""


class RankProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of an order."""

    name: str
    """The order's."""
    state: Literal["waiting", "running", "written", "failed"]
    file: str = ""
    """The trace, in the order's folder."""
    first_step: int = 0
    num_steps: int = 0
    """Those that the trace has."""
    reason: str = ""
    """Why it failed."""


def create_number(run_dir: Path) -> None:
    """Make the number's file, before the ranks start."""
    (run_dir / NUMBER).write_bytes(bytes(NUMBER_BYTES))


def write_order(run_dir: Path, order: ProfileOrder) -> None:
    """Write an order, and let its number follow: a rank that sees the number finds this order or a newer one.

    Raises `OSError` without space.
    """
    _replace(run_dir / ORDER, msgspec.json.encode(order))
    with (run_dir / NUMBER).open("r+b", buffering=0) as file:
        file.write(order.number.to_bytes(NUMBER_BYTES, "little"))


def read_order(run_dir: Path) -> ProfileOrder:
    return msgspec.json.decode((run_dir / ORDER).read_bytes(), type=ProfileOrder)


def write_rank_profile(run_dir: Path, rank: int, profile: RankProfile) -> None:
    """Say how far a rank is. Raises `OSError` without space."""
    _replace(_rank_file(run_dir, rank), msgspec.json.encode(profile))


def read_rank_profile(run_dir: Path, rank: int) -> RankProfile | None:
    """What it said last; None before it said anything."""
    file = _rank_file(run_dir, rank)
    return msgspec.json.decode(file.read_bytes(), type=RankProfile) if file.exists() else None


def _rank_file(run_dir: Path, rank: int) -> Path:
    return run_dir / f"profile-rank-{rank}"


def _replace(file: Path, content: bytes) -> None:
    """A reader sees all of it, or what was there before."""
    written = file.with_name(f"{file.name}.new")
    written.write_bytes(content)
    written.replace(file)
