"""Named ranges in a profiler's trace: torch's, or Nsight's through ``emit_nvtx``. Free when no profiler runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING = nullcontext()


def nvtx_range(name: str) -> AbstractContextManager[object]:
    """A range of host time; the profiler links the GPU work launched within it."""
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else _NOTHING
