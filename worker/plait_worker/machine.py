"""What this machine, and the control groups around this process, leave to it."""

from __future__ import annotations

import ctypes
import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_CGROUP_ROOT = Path("/sys/fs/cgroup")


def die_with_parent(parent: int | None) -> None:
    """Have the kernel end this process when its parent dies (Linux).

    ``parent`` is the one that started it: where it is gone already, nobody is left to give the signal, and this
    raises ``ProcessLookupError``. Raises ``OSError`` where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        raise ProcessLookupError(f"process {parent}, which started this one, is gone")


def free_memory_bytes() -> int:
    """What can be allocated before the kernel swaps or kills: the machine's share, or a control group's if less."""
    groups = [group.free_bytes(folder) for group in _MEMORY_GROUPS for folder in group.folders()]
    return max(0, int(min([_available_bytes(), *groups])))


def num_usable_cores() -> int:
    """Cores that the affinity mask and the control groups' quotas allow, at least 1."""
    quotas = [_quota_cores(folder) for folder in _folders(_CGROUP_ROOT, "")]
    return max(1, math.floor(min([len(os.sched_getaffinity(0)), *quotas])))


@dataclass(frozen=True, slots=True)
class _MemoryGroup:
    """Where one version of control groups keeps its figures."""

    root: Path
    controller: str
    limit: str
    used: str
    reclaimable: str

    def folders(self) -> list[Path]:
        return _folders(self.root, self.controller)

    def free_bytes(self, folder: Path) -> float:
        """Limit less use, where file pages that the kernel drops first do not count as used."""
        limit, used = _words(folder / self.limit), _words(folder / self.used)
        if not limit or not used or limit[0] == "max":
            return math.inf
        statistics = _words(folder / "memory.stat")
        reclaimable = dict(zip(statistics[::2], statistics[1::2], strict=False)).get(self.reclaimable, "0")
        return int(limit[0]) - int(used[0]) + int(reclaimable)


_MEMORY_GROUPS = (
    _MemoryGroup(_CGROUP_ROOT, "", "memory.max", "memory.current", "inactive_file"),
    _MemoryGroup(
        _CGROUP_ROOT / "memory",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def _folders(root: Path, controller: str) -> list[Path]:
    """This process's group of a controller and all groups around it; the root alone where a namespace hides them."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == controller:
            own = root / path.lstrip("/")
            return [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return []


def _available_bytes() -> int:
    words = _words(Path("/proc/meminfo"))
    return int(words[words.index("MemAvailable:") + 1]) * 1024


def _quota_cores(folder: Path) -> float:
    words = _words(folder / "cpu.max")
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else math.inf


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []
