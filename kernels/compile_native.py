"""Compiles the CPU kernels into ``plait_kernels/cpu``, once for each instruction set; prints what it made.

The package's build runs this (``hatch_build.py``); by hand: ``python kernels/compile_native.py``. Nothing is compiled
later: the processor's own build is chosen among these at start-up.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

ROOM = Path(__file__).resolve().parent
SOURCES = [ROOM / "csrc" / name for name in ("library.cpp", "team.cpp")]
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


def compiler() -> str:
    """The C++ compiler. Raises ``SystemExit`` where there is none."""
    found = shutil.which(os.environ.get("CXX", "c++"))
    if found is None:
        raise SystemExit("plait-kernels needs a C++ compiler: sudo apt install build-essential")
    return found


def build() -> list[Path]:
    """Compile every level; the libraries' paths, relative to this room."""
    (ROOM / FOLDER).mkdir(exist_ok=True)
    targets = [FOLDER / f"libplait_{level}.so" for level in levels()]
    for target, options in zip(targets, levels().values(), strict=True):
        command = [compiler(), *OPTIONS, "-fvisibility=hidden", *options, *map(str, SOURCES), "-o", str(ROOM / target)]
        subprocess.run(command, check=True)
    return targets


if __name__ == "__main__":
    for path in build():
        print(path)
