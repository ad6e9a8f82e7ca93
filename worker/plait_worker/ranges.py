"""Named ranges in a profiler's trace (torch's, or NVIDIA's by ``emit_nvtx``); nothing where no profiler runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING = nullcontext()


def named(what: str) -> AbstractContextManager[object]:
    """A range of the host's time; the work that it hands to a GPU is linked with it."""
    return torch.profiler.record_function(what) if torch.autograd._profiler_enabled() else _NOTHING
