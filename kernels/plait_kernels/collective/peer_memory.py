"""GPU memory that the other ranks of a replica write into, opened to them by CUDA IPC.

Source: CUDA driver API, "Memory Management". Memory is allocated plainly (``cuMemAlloc``): the driver's virtual memory
management and its multicast objects are not needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait_kernels.nvrtc import check

_GRANULE = 2 << 20
"""The driver divides smaller allocations, and IPC opens whole ones."""


class PeerMemory:
    """A rank's own memory, which lives as long as the process."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """``num_bytes``, rounded up to 2 MiB. Raises ``CudaError`` if there is too little."""
        from cuda.bindings import driver

        torch.cuda.current_stream(device).synchronize()  # makes the device's context current
        self.num_bytes = -(-num_bytes // _GRANULE) * _GRANULE
        (pointer,) = check(driver.cuMemAlloc(self.num_bytes))
        self.address = int(pointer)

    def fill(self, word: int) -> None:
        """Write a 32-bit word everywhere."""
        from cuda.bindings import driver

        check(driver.cuMemsetD32(self.address, word, self.num_bytes // 4))
        torch.cuda.synchronize()

    def handle(self) -> bytes:
        """64 bytes by which another process opens it."""
        from cuda.bindings import driver

        return bytes(check(driver.cuIpcGetMemHandle(self.address))[0].reserved)

    def open_all(self, rank: int, handles: Sequence[bytes]) -> list[int]:
        """The addresses, on this device, of every rank's memory. Raises ``CudaError`` if a peer's cannot be reached."""
        return [self.address if peer == rank else _open(handle) for peer, handle in enumerate(handles)]


def _open(handle: bytes) -> int:
    from cuda.bindings import driver

    given = driver.CUipcMemHandle()
    given.reserved = handle
    flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(check(driver.cuIpcOpenMemHandle(given, flags))[0])
