"""Whether an error says that there was no memory to give, whoever said so."""

from __future__ import annotations

import errno
import os

import torch

_WORDS = ("DefaultCPUAllocator", os.strerror(errno.ENOMEM))
"""Of torch's allocator on a CPU, and of the system behind libraries that raise what they like."""


def is_out_of_memory(error: BaseException) -> bool:
    """True of Python's error, of a GPU's, of a mapping's, and of torch's plain RuntimeError on a CPU."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def what_was_asked(error: BaseException) -> str:
    """The error's first line: behind it torch lists the calls that led there."""
    return (str(error) or repr(error)).splitlines()[0]
