"""Python reads this at its start if its folder is on the path: a worker waits in a step while a file says so, dies of a
step that computes `POISON`, and computes NaN for a request of whose prompt a chunk holds `SPOILT`. Other files let it
ask for `MORE_BYTES` of memory, or send garbage in place of a result.

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
MORE_BYTES = 1 << 26
LOOK_SECONDS = 0.01
GATHER_SECONDS = 0.05
"""A step before so many rows are there: short answers wait for a stream that a busy machine begins late."""


def held(launch: Callable[[Any, Any], Any], folder: Path) -> Callable[[Any, Any], Any]:
    """``Rank.launch`` or ``Rank.launch_forward``, when the test lets it."""
    hold, hungry = folder / "hold", folder / "hungry"

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
        if hungry.exists():
            hungry.unlink()
            _ask_for_memory()
        return launch(rank, plan)

    return launch_later


def _ask_for_memory() -> None:
    """As a step of many tokens does."""
    import torch

    torch.empty(MORE_BYTES, dtype=torch.uint8)


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


def garbling(encode: Callable[[Any], list[bytes]], file: Path) -> Callable[[Any], list[bytes]]:
    """``encode``, whose next result is the garbage that the file names."""

    def encode_garbled(message: Any) -> list[bytes]:
        if type(message).__name__ != "StepResult" or not file.exists():
            return encode(message)
        kind = file.read_text()
        file.unlink()
        return GARBAGE[kind](encode, message)

    return encode_garbled


def _impossible(**fields: Any) -> Callable[..., list[bytes]]:
    """A result that can be read and cannot be."""

    def frames(encode: Callable[[Any], list[bytes]], message: Any) -> list[bytes]:
        import msgspec

        return encode(msgspec.structs.replace(message, **fields))

    return frames


GARBAGE: dict[str, Callable[..., list[bytes]]] = {
    "noise": lambda encode, message: [os.urandom(len(frame)) for frame in encode(message)],
    "cut short": lambda encode, message: [frame[: len(frame) // 2] or frame for frame in encode(message)],
    "no frames but the kind": lambda encode, message: encode(message)[:1],
    "another step": _impossible(step=1 << 40),
    "more rows": _impossible(num_accepted=(1).to_bytes(4, "little") * 99, token_ids=(7).to_bytes(4, "little") * 99),
    "no such token": lambda encode, message: _impossible(
        token_ids=(1 << 30).to_bytes(4, "little") * (len(bytes(message.token_ids)) // 4)
    )(encode, message),
}
"""By name: the frames sent in place of the message's."""


def _read(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except FileNotFoundError:
        return None


if "plait_worker" in sys.orig_argv:
    from plait_worker import loop
    from plait_worker.rank import Rank

    folder = Path(os.environ["PLAIT_TEST_HELD_STEPS"])
    Rank._sample = spoiling(Rank._sample)  # type: ignore[method-assign]
    Rank.launch = held(Rank.launch, folder)  # type: ignore[method-assign, assignment]
    Rank.launch_forward = held(Rank.launch_forward, folder)  # type: ignore[method-assign, assignment]
    loop.encode = garbling(loop.encode, folder / "garbage")  # type: ignore[attr-defined, assignment]
