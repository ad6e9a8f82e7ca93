"""Compiles the CPU kernels into ``plait_kernels/cpu``, once for each instruction set; prints the libraries.

The package's build runs this (``hatch_build.py``), an editable install twice; by hand: ``python
kernels/compile_native.py``. A library that is newer than its sources is kept, unless ``CXX`` names a compiler. Nothing
is compiled later: the processor's own build is chosen among these at start-up. A build that the compiler cannot make is
left out with a warning: a simpler build, or torch, then computes instead.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOM = Path(__file__).resolve().parent
SOURCES = [ROOM / "csrc" / name for name in ("library.cpp", "thread_pool.cpp")]
FOLDER = Path("plait_kernels") / "cpu"
# GCC 12 finds uninitialised values in its own headers of vector intrinsics.
OPTIONS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
)
X86_LEVELS = {
    "avx512bf16": (
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mavx512bf16",
        "-mavx512vnni",
        "-mfma",
        "-mf16c",
    ),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "portable": (),
}


def levels() -> dict[str, tuple[str, ...]]:
    """The instruction sets that this kind of processor may have, with the compiler's options for each."""
    return X86_LEVELS if platform.machine() in ("x86_64", "AMD64") else {"portable": ()}


def compiler() -> str | None:
    """The C++ compiler; None if there is none."""
    return shutil.which(os.environ.get("CXX", "c++"))


def target(level: str) -> Path:
    """Where a level's library goes, relative to this folder."""
    return FOLDER / f"libplait_{level}.so"


def build() -> list[Path]:
    """Compile every level that the compiler can; the libraries' paths, relative to this folder.

    An earlier build's library that cannot be made again is removed: it may not fit the sources any more.
    """
    (ROOM / FOLDER).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        made = dict(zip(levels(), pool.map(has_library, levels()), strict=True))
    for level in (level for level, is_there in made.items() if not is_there):
        (ROOM / target(level)).unlink(missing_ok=True)
    if warning := missing_levels_warning(made):
        print(warning, file=sys.stderr)
    return [target(level) for level, is_there in made.items() if is_there]


def has_library(level: str) -> bool:
    """Whether a level's library is there, compiled now if need be."""
    return is_current(level) or compile_level(level)


def is_current(level: str) -> bool:
    """Whether a level's library is newer than all that it is made of; never where ``CXX`` names the compiler."""
    library = ROOM / target(level)
    if "CXX" in os.environ or not library.exists():
        return False
    made_of = [Path(__file__), *(ROOM / "csrc").iterdir()]
    return library.stat().st_mtime > max(path.stat().st_mtime for path in made_of)


def compile_level(level: str) -> bool:
    """Whether the compiler exists and takes the sources; its messages go to standard error."""
    if (cxx := compiler()) is None:
        return False
    library = ROOM / target(level)
    unfinished = library.with_suffix(".unfinished")  # a compiler that is killed leaves no library that looks current
    command = [cxx, *OPTIONS, "-fvisibility=hidden", *levels()[level], *map(str, SOURCES), "-o", str(unfinished)]
    is_made = subprocess.run(command, check=False).returncode == 0
    if is_made:
        unfinished.replace(library)
    unfinished.unlink(missing_ok=True)
    return is_made


def missing_levels_warning(is_there: Mapping[str, bool]) -> str | None:
    """A warning of the missing levels: what is slower, and what to install; None if all are there."""
    missing = [level for level, there in is_there.items() if not there]
    if not missing:
        return None
    loss = "a simpler build serves their processors, slower"
    if len(missing) == len(is_there):
        loss = "torch computes GEMMs, attention and experts on a CPU, slower"
    return (
        f"WARNING: the CPU kernels for {', '.join(missing)} are NOT compiled: {loss}. Install a compiler of C++20 that "
        "knows these instructions (GCC 12 is one: sudo apt install build-essential), then install plait-kernels again"
    )


if __name__ == "__main__":
    for path in build():
        print(path)
