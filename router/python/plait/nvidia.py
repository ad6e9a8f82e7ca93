"""Whether a GPU of NVIDIA's can be used here. The installer reads this file before anything is installed."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")
_WSL_CUDA = "usr/lib/wsl/lib/libcuda.so.1"


def has_nvidia_gpu(root: Path = ROOT) -> bool:
    """A device of the driver's is there; ``root`` is the file system's.

    In Linux on Windows any maker's GPU shows as ``/dev/dxg``, and NVIDIA's brings its CUDA library besides. A driver's
    traces elsewhere say nothing: a container without the device sees the host's.
    """
    devices = root / "dev"
    if (devices / "nvidiactl").exists() or any(devices.glob("nvidia[0-9]*")):
        return True
    return (devices / "dxg").exists() and (root / _WSL_CUDA).exists()
