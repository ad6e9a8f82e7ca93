"""Cores and memory that the machine and the control groups leave to this process."""

from __future__ import annotations

import ctypes
import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_FIRST_VERSION_CPU = ("cpu", "cpu,cpuacct")
"""Where control groups of the first version may be mounted that limit the processor."""


def die_with_parent(parent: int | None) -> None:
    """Have the kernel end this process when its parent dies (Linux).

    ``parent`` is the one that started it: if it is gone already, no signal will come, and this
    raises ``ProcessLookupError``. Raises ``OSError`` if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        raise ProcessLookupError(f"process {parent}, which started this one, is gone")


def free_memory_bytes() -> int:
    """What can be allocated before the kernel swaps or kills: the machine's, or the control groups' if less."""
    groups = [group.free_bytes(folder) for group in _MEMORY_GROUPS for folder in group.folders()]
    return max(0, int(min([_available_bytes(), *groups])))


def num_usable_cores() -> int:
    """Cores that the affinity mask and the control groups' quotas allow, at least 1."""
    quotas = [_read_words(folder / "cpu.max") for folder in _find_cgroup_folders("", "")]
    first_version = [folder for mounted in _FIRST_VERSION_CPU for folder in _find_cgroup_folders(mounted, "cpu")]
    quotas += [
        _read_words(folder / "cpu.cfs_quota_us") + _read_words(folder / "cpu.cfs_period_us") for folder in first_version
    ]
    return max(1, math.floor(min([len(os.sched_getaffinity(0)), *map(_quota_cores, quotas)])))


@dataclass(frozen=True, slots=True)
class _MemoryGroup:
    """Where one version of control groups keeps its figures."""

    mounted: str
    controller: str
    limit: str
    used: str
    reclaimable: str

    def folders(self) -> list[Path]:
        return _find_cgroup_folders(self.mounted, self.controller)

    def free_bytes(self, folder: Path) -> float:
        """Limit minus use; file pages that the kernel can drop do not count as used."""
        limit, used = _read_words(folder / self.limit), _read_words(folder / self.used)
        if not limit or not used or limit[0] == "max":
            return math.inf
        statistics = _read_words(folder / "memory.stat")
        reclaimable = dict(zip(statistics[::2], statistics[1::2], strict=False)).get(self.reclaimable, "0")
        return int(limit[0]) - int(used[0]) + int(reclaimable)


_MEMORY_GROUPS = (
    _MemoryGroup("", "", "memory.max", "memory.current", "inactive_file"),
    _MemoryGroup("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _find_cgroup_folders(mounted: str, controller: str) -> list[Path]:
    """This process's group of a controller and all groups around it; the root alone if a namespace hides them.

    ``controller`` is empty for groups of the second version, of which there is one tree; one of the first version
    may share its tree with others.
    """
    root = _CGROUP_ROOT / mounted
    for line in _OWN_GROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = root / path.lstrip("/")
            return [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return []


def _available_bytes() -> int:
    words = _read_words(Path("/proc/meminfo"))
    return int(words[words.index("MemAvailable:") + 1]) * 1024


def _quota_cores(words: list[str]) -> float:
    """Of a quota and its period, in microseconds; the quota is max or -1 if there is none."""
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] not in ("max", "-1") else math.inf


def _read_words(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []
