"""Errors that end a worker, and how to recognise one that the system raised for want of memory."""

from __future__ import annotations

import errno
import os

import torch
from plait_proto import ExitCode

_OUT_OF_MEMORY = ("DefaultCPUAllocator", os.strerror(errno.ENOMEM))
"""Texts of torch's CPU allocator, and of libraries that raise errors of their own for the system's ENOMEM."""


class WorkerError(Exception):
    """The worker cannot go on; the reason says what was found and what to do."""

    def __init__(self, code: ExitCode, reason: str) -> None:
        """``reason`` is one sentence for the person who started the server."""
        super().__init__(reason)
        self.code = code
        self.reason = reason


class EngineError(WorkerError):
    """The engine closed or refused the link, so the reason cannot be reported to it."""


class ModelFilesError(ValueError):
    """A model's files are missing, broken or not supported; the message says which, why, and what to do."""


def ensure(condition: bool, reason: str) -> None:
    """Raise a WorkerError of code BUG unless ``condition``: the engine's plan and the worker's state disagree."""
    if not condition:
        raise WorkerError(ExitCode.BUG, reason)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, a GPU, a file mapping, or torch's CPU allocator (a plain RuntimeError) ran out of memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def first_line(error: BaseException) -> str:
    """The message without the call stack that torch appends to it."""
    return (str(error) or repr(error)).splitlines()[0]
