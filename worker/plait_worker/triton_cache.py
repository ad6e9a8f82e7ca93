"""Our kernels in Triton's cache; the first start compiles the missing ones."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path

import plait_kernels

_DEFINITION = re.compile(r"^@triton\.jit.*\n(?:#.*\n)*def (\w+)\(", re.MULTILINE)


def compiled_kernels(folder: Path) -> Counter[str]:
    """Compiled variants of each of our kernels, by name, from any version of Plait and Triton."""
    found = Counter(path.stem for path in folder.glob("*/*.cubin"))
    ours = _names()
    return Counter({name: num for name, num in found.items() if name in ours})


def cache_folder() -> Path | None:
    """Triton's cache folder; None if Triton is not installed."""
    try:
        knobs = importlib.import_module("triton.knobs")
    except ImportError:
        return None
    return Path(knobs.cache.dir)


def _names() -> set[str]:
    """Names of all our Triton kernels."""
    folder = Path(plait_kernels.__file__).parent
    return {name for path in folder.rglob("*.py") for name in _DEFINITION.findall(path.read_text(encoding="utf-8"))}
