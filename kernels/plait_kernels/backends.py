"""Finds the backend of a family that a device needs; Triton is imported only where there is a GPU."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType


@functools.cache
def triton_backend(family: str, module: str = "triton") -> ModuleType:
    """``FAMILY.triton``, the GPU's backend of the family with this package name, or one of several modules."""
    return importlib.import_module(f"{family}.{module}")
