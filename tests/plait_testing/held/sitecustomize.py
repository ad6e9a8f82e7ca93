"""Python reads this at its start if its folder is on the path: a worker waits in a step while a file says so, dies of a
step that computes `POISON`, and computes NaN for a request of whose prompt a chunk holds `SPOILT`.

``PLAIT_TEST_HELD_STEPS`` names the folder of the files. Tokens of the check models are bytes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

POISON = b"".join(byte.to_bytes(4, "little") for byte in b"~poison~")
"""As token ids on the wire."""
SPOILT = b"".join(byte.to_bytes(4, "little") for byte in b"~nan~")
LOOK_SECONDS = 0.01
GATHER_SECONDS = 0.05
"""A step before so many rows are there: short answers wait for a stream that a busy machine begins late."""


def held(launch: Callable[[Any, Any], Any], folder: Path) -> Callable[[Any, Any], Any]:
    """``Rank.launch`` or ``Rank.launch_forward``, when the test lets it."""
    hold = folder / "hold"

    def launch_later(rank: Any, plan: Any) -> Any:
        if POISON in bytes(plan.token_ids):
            os.kill(os.getpid(), signal.SIGKILL)
        spoilt.difference_update(new.slot for new in plan.new_slots)
        spoilt.update(slot for slot, chunk in _chunks(plan) if SPOILT in chunk)
        if _read(hold) is not None:
            time.sleep(GATHER_SECONDS)
        while (num_decode := _read(hold)) is not None and plan.num_decode >= num_decode:
            (folder / f"held-{os.getpid()}").touch()
            time.sleep(LOOK_SECONDS)
        return launch(rank, plan)

    return launch_later


spoilt: set[int] = set()
"""Slots."""


def _chunks(plan: Any) -> Iterator[tuple[int, bytes]]:
    """Slot and token ids of each prefill row."""
    rows, ids = memoryview(bytes(plan.rows)).cast("I").tolist(), bytes(plan.token_ids)
    for slot, _, length, flags in zip(*[iter(rows[: 4 * plan.num_prefill])] * 4, strict=True):
        end = 4 * (length + (flags >> 1))
        yield slot, ids[:end]
        ids = ids[end:]


def spoiling(sample: Callable[..., Any]) -> Callable[..., Any]:
    """``Rank._sample`` of logits of which those of some slots are NaN."""

    def sample_spoilt(rank: Any, logits: Any, slots: Any, masks: Any = None) -> Any:
        for row, slot in enumerate(slots.tolist()):
            if slot in spoilt:
                logits[row] = float("nan")
        return sample(rank, logits, slots, masks)

    return sample_spoilt


def _read(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except FileNotFoundError:
        return None


if "plait_worker" in sys.orig_argv:
    from plait_worker.rank import Rank

    folder = Path(os.environ["PLAIT_TEST_HELD_STEPS"])
    Rank._sample = spoiling(Rank._sample)  # type: ignore[method-assign]
    Rank.launch = held(Rank.launch, folder)  # type: ignore[method-assign, assignment]
    Rank.launch_forward = held(Rank.launch_forward, folder)  # type: ignore[method-assign, assignment]
