"""Rates of the links between this machine's devices, as a process of the worker measures them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

SECONDS = 120.0
"""Until it is given up. Most of it is the import of torch, and a context on each GPU."""
SLOW = 0.5
"""Of the fastest link: a pair below it is named."""


class LinkRate(NamedTuple):
    """Of copies in one direction."""

    source: int
    target: int
    bytes_per_second: float


def measure_links(devices: Sequence[str]) -> list[LinkRate]:
    """Each pair of devices, both ways. Raises `OSError`, `subprocess.SubprocessError` or `msgspec.MsgspecError`."""
    command = [sys.executable, "-m", "plait_worker.link_rates", *devices]
    done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=True)
    return msgspec.json.decode(done.stdout, type=list[LinkRate])


def describe_links(rates: Sequence[LinkRate]) -> tuple[str, str]:
    """`ok` or `note`, and the rates with the pairs that are much slower than the fastest."""
    fastest = max(rate.bytes_per_second for rate in rates)
    slow = [rate for rate in rates if rate.bytes_per_second < SLOW * fastest]
    slowest = min(rate.bytes_per_second for rate in rates)
    said = f"copies between GPUs: {slowest / 1e9:.0f} to {fastest / 1e9:.0f} GB/s"
    if not slow:
        return "ok", said
    pairs = ", ".join(f"{one.source} to {one.target} {one.bytes_per_second / 1e9:.0f} GB/s" for one in slow)
    return "note", f"{said}; slow: {pairs}; give a replica's ranks GPUs with fast links (CUDA_VISIBLE_DEVICES)"


def links_line(num_gpus: int) -> str:
    """The line of `plait doctor`. What cannot be measured is a note: the server may still run."""
    try:
        state, said = describe_links(measure_links([f"cuda:{number}" for number in range(num_gpus)]))
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        state, said = "note", f"rates were not measured: {last}"
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        state, said = "note", f"rates were not measured: {error}"
    return f"  {'links':<8} {state:<5} {said}"
