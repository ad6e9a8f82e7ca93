"""CUDA kernels on a CPU: a C++ compiler builds them with ``tests/kernels/played_gpu``, which plays a GPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torch import Tensor

PLAYED = Path(__file__).parents[1] / "kernels" / "played_gpu"
HEADERS = "algorithm", "cmath", "cstdint", "cstring", "deque", "functional", "map", "memory", "vector", "ucontext.h"
MULTIPROCESSORS = 3
"""Of the played GPU: fewer than blocks have work for."""


@cache
def played(folder: Path, runner: str, defines: tuple[str, ...]) -> ctypes.CDLL:
    """A runner of ``played_gpu`` with the kernel that it includes, whose sources are in a folder."""
    library = folder / f"{runner}-{len(list(folder.iterdir()))}.so"
    names = [f"-D{define}" for define in defines]
    built = ["-shared", f"-I{PLAYED}", f"-I{folder}", "-include", str(_precompiled(folder)), *names]
    _compile([*built, str(PLAYED / f"{runner}.cpp"), "-o", str(library)])
    return ctypes.CDLL(str(library))


@cache
def _precompiled(folder: Path) -> Path:
    """The standard headers of every runner, which take nearly half of its compilation."""
    headers = folder / "headers.hpp"
    headers.write_text("".join(f"#include <{header}>\n" for header in HEADERS))
    _compile(["-x", "c++-header", str(headers), "-o", f"{headers}.gch"])
    return headers


def _compile(words: Sequence[str]) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    assert compiler is not None, "the kernels are built with a C++ compiler: sudo apt install build-essential"
    subprocess.run([compiler, "-std=c++20", "-O1", "-w", "-fPIC", *words], check=True)


def run(
    library: ctypes.CDLL, launch: Sequence[int], tensors: Sequence[Tensor], numbers: Sequence[int], eps: float = 0
) -> int:
    """What the runner returns."""
    ended: int = library.run(
        (ctypes.c_int * len(launch))(*launch),
        (ctypes.c_void_p * len(tensors))(*(each.data_ptr() for each in tensors)),
        (ctypes.c_longlong * len(numbers))(*numbers),
        ctypes.c_double(eps),
    )
    return ended
