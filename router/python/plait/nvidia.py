"""Whether an NVIDIA GPU is usable. The installer reads this file before anything is installed."""

from __future__ import annotations

import subprocess
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


def gpu_memory_bytes() -> int | None:
    """Memory of the smallest GPU, as `nvidia-smi` reports it; None without that command, and for slices (MIG)."""
    command = ["nvidia-smi", "--query-gpu=memory.total,mig.mode.current", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True)
        gpus = [line.split(", ") for line in done.stdout.splitlines()]
        return None if any(mig == "Enabled" for _, mig in gpus) else min(int(memory) for memory, _ in gpus) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
