"""Whether an NVIDIA GPU is usable. The installer reads this file before anything is installed."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path("/")
NVIDIA_SMI_SECONDS = 10.0
_WSL_CUDA = "usr/lib/wsl/lib/libcuda.so.1"


def has_nvidia_gpu(root: Path = ROOT) -> bool:
    """Whether the driver's device exists under ``root``.

    In WSL any GPU shows as ``/dev/dxg``; only NVIDIA's also has a CUDA library. Other traces of a driver prove nothing:
    a container without the device sees the host's.
    """
    devices = root / "dev"
    if (devices / "nvidiactl").exists() or any(devices.glob("nvidia[0-9]*")):
        return True
    return (devices / "dxg").exists() and (root / _WSL_CUDA).exists()


def gpu_memory_bytes(visible_devices: str | None = None) -> int | None:
    """Memory of the smallest GPU, as `nvidia-smi` reports it; None without that command.

    For `visible_devices` see `smallest_memory_bytes`.
    """
    command = ["nvidia-smi", "--query-gpu=uuid,memory.total,mig.mode.current", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True)
        return smallest_memory_bytes(done.stdout, visible_devices)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def is_hopper(visible_devices: str | None = None) -> bool:
    """Whether all visible GPUs are of compute capability 9, as `nvidia-smi` reports it."""
    command = ["nvidia-smi", "--query-gpu=uuid,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True)
        found = visible_lines(done.stdout, visible_devices)
    except (OSError, ValueError, subprocess.SubprocessError):
        return False
    return bool(found) and all(capability.startswith("9.") for _, capability in found)


def smallest_memory_bytes(listed: str, visible_devices: str | None) -> int | None:
    """Memory of the smallest visible GPU of nvidia-smi's lines `UUID, MiB, MIG mode`.

    `visible_devices` is `CUDA_VISIBLE_DEVICES`, None if it is not set: indices into the list, or UUIDs or what they
    begin with. None if no GPU is visible, or if one is sliced (MIG). Raises `ValueError` for other lines.
    """
    gpus = visible_lines(listed, visible_devices)
    if any(mig == "Enabled" for _, _, mig in gpus):
        return None
    return min((int(memory) << 20 for _, memory, _ in gpus), default=None)


def visible_lines(listed: str, visible_devices: str | None) -> list[list[str]]:
    """The fields of nvidia-smi's lines, which begin with the UUID, of the visible GPUs."""
    gpus = [line.split(", ") for line in listed.splitlines()]
    return gpus if visible_devices is None else list(_visible(gpus, visible_devices.split(",")))


def pairs_without_peer_access(gpus: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of these GPUs that cannot read each other's memory, as `nvidia-smi` reports; none without that command."""
    command = ["nvidia-smi", "topo", "-p2p", "r"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return list(read_peer_table(done.stdout, gpus))


def read_peer_table(table: str, gpus: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs of `gpus` without access in nvidia-smi's matrix: a line `GPU0 X OK ...` for each GPU."""
    rows = [line.split() for line in table.splitlines()]
    cells = {
        int(row[0][3:]): row[1:] for row in rows if len(row) > 1 and row[0][3:].isdecimal() and row[1][:3] != "GPU"
    }
    for first, second in itertools.combinations(gpus, 2):
        row = cells.get(first, [])
        if second < len(row) and row[second] != "OK":
            yield first, second


def _visible(gpus: list[list[str]], words: list[str]) -> Iterator[list[str]]:
    """CUDA ignores the first word that names no GPU and all that follow."""
    for word in map(str.strip, words):
        if word.isdecimal():
            found = gpus[int(word) : int(word) + 1]
        else:
            found = [gpu for gpu in gpus if word and gpu[0].startswith(word)]
        if len(found) != 1:
            return
        yield found[0]
