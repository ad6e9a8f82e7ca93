"""/dev/shm: what it has, and whether NCCL may want more."""

from __future__ import annotations

import os
from pathlib import Path

from plait.batch_sizes import uses_gpu
from plait.settings import ServeSettings

SHM = Path("/dev/shm")
MIN_SHM_BYTES = 1 << 30


def shm_bytes(folder: Path = SHM) -> int:
    """Its size; 0 if it is not there."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize


def shm_note(num_bytes: int) -> str:
    """What to do about so many; empty if they are enough."""
    if num_bytes >= MIN_SHM_BYTES:
        return ""
    return (
        f"/dev/shm has {num_bytes >> 20} MiB, NCCL may want {MIN_SHM_BYTES >> 20}; docker run --shm-size=8g, or the "
        "chart's value shm"
    )


def note_for_ranks(settings: ServeSettings, num_bytes: int) -> str:
    """As `shm_note`; empty where no ranks on GPUs exchange anything."""
    exchange = settings.process.tp > 1 or settings.process.dp_attention
    return shm_note(num_bytes) if exchange and uses_gpu(settings) else ""
