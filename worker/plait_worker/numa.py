"""NUMA: pinned memory and the thread that launches kernels belong on the GPU's own node."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import torch

_SYSTEM = Path("/sys")
_OWN_THREADS = Path("/proc/self/task")


def bind_to_gpu_node(device: torch.device) -> str | None:
    """Bind this process and its later allocations to the GPU's node; returns the node's description.

    None if nothing changes: the machine is one node, the device has none, or the process may use none of its cores.
    ``device`` is in use already.
    """
    address = _pci_address(device)
    return None if address is None else bind_to_node(address)


def _pci_address(device: torch.device) -> str | None:
    """``domain:bus:device.function`` of its PCI slot; None if the driver does not say."""
    driver, number, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.create_string_buffer(32)
    if driver.cuDeviceGet(ctypes.byref(number), device.index) != 0:
        return None
    if driver.cuDeviceGetPCIBusId(address, len(address), number) != 0:
        return None
    return address.value.decode().lower()


def bind_to_node(address: str) -> str | None:
    """The same for the PCI device at this address."""
    node = _number(_SYSTEM / "bus/pci/devices" / address / "numa_node")
    nodes = _SYSTEM / "devices/system/node"
    if node is None or node < 0 or len(list(nodes.glob("node[0-9]*"))) < 2:
        return None
    cores = _cores(nodes / f"node{node}" / "cpulist") & os.sched_getaffinity(0)
    if not cores:
        return None
    for thread in _OWN_THREADS.iterdir():
        with suppress(OSError):  # it has ended meanwhile, or may not be moved
            os.sched_setaffinity(int(thread.name), cores)
    return f"node {node}, {len(cores)} cores"


def _number(path: Path) -> int | None:
    return int(path.read_text()) if path.is_file() else None


def _cores(path: Path) -> set[int]:
    """Of a list such as ``0-3,8-11``; a node may have none."""
    spans = (part.split("-") for part in path.read_text().strip().split(",") if part)
    return {core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)}
