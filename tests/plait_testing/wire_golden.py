"""The golden files of the wire, read."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).parents[2] / "proto" / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))


def golden_frames(name: str) -> list[bytes]:
    """The frames in a ``.bin``, each after its length."""
    raw = (GOLDEN / f"{name}.bin").read_bytes()
    frames = []
    while raw:
        end = 4 + int.from_bytes(raw[:4], "little")
        frames.append(raw[4:end])
        raw = raw[end:]
    return frames
