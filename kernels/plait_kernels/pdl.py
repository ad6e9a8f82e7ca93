"""PDL (programmatic dependent launch): a kernel starts while the kernel before it still runs, and waits inside.

Source: CUDA programming guide, "Programmatic Dependent Launch and Synchronization". A kernel launched with
``pdl_launch`` must call ``pdl_wait`` (or ``gdc_wait``) before it reads or writes what other kernels write; weights may
be read before, and behind a kernel with ``pdl_wait_first`` what kernels before that one wrote. Each kernel waits for
the whole kernel before it, so that all before that have ended too.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def pdl_launch(tensor: Tensor) -> dict[str, bool]:
    """Launch options of a PDL kernel; off below compute capability 9.0."""
    return {"PDL": True, "launch_pdl": True} if tensor.is_cuda and _supports_pdl(tensor.device) else {"PDL": False}


@functools.cache
def _supports_pdl(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit  # type: ignore[untyped-decorator]
def pdl_wait(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel start, and wait for the kernel before this one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def pdl_wait_first(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the kernel before this one, and then let the next kernel start.

    All kernels before this one have ended when the next one starts: it may read what they wrote before it waits.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
