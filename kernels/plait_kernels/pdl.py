"""Programmatic dependent launch: a kernel's programs start while the kernel before it still runs, and wait inside.

Source: CUDA programming guide, "Programmatic Dependent Launch and Synchronization". A kernel that is launched so must
call ``pdl_wait``, or wait by itself, before it reads or writes anything that other kernels write; weights it may read
earlier. Each waits for the whole kernel before it, so nothing can be overtaken by two.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def pdl_launch(tensor: Tensor) -> dict[str, bool]:
    """What such a kernel is launched with; off below compute capability 9.0."""
    return {"PDL": True, "launch_pdl": True} if tensor.is_cuda and _supports_pdl(tensor.device) else {"PDL": False}


@functools.cache
def _supports_pdl(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit  # type: ignore[untyped-decorator]
def pdl_wait(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel's programs come in, and wait for the kernel before this one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
