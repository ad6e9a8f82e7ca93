"""nvcc and ninja for flashinfer: where it finds them, and whether it would compile a cached module again.

flashinfer loads its cache through ninja, which recompiles after a change: another toolkit folder, a missing header,
flashinfer in another place. The rules are those of flashinfer 0.7.2.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import torch

_USUAL_HOME = "/usr/local/cuda"
_SECONDS_FOR_AN_ANSWER = 60


def find_nvcc() -> Path | None:
    """nvcc as flashinfer finds it: in ``CUDA_HOME``, else on the search path, else in the usual folder."""
    found = shutil.which(f"{_cuda_home()}/bin/nvcc")
    return Path(found) if found else None


def _cuda_home() -> str:
    from flashinfer.jit.cpp_ext import get_cuda_path

    try:
        return str(get_cuda_path())
    except (OSError, RuntimeError):  # the usual folder was tried too
        return _USUAL_HOME


def cuda_version(nvcc: Path) -> str | None:
    """The CUDA release of ``nvcc``, such as 13.0; None if it names none."""
    try:
        answer = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, check=True, timeout=_SECONDS_FOR_AN_ANSWER
        )
    except (OSError, subprocess.SubprocessError):
        return None
    release = re.search(r"release (\d+\.\d+)", answer.stdout)
    return release[1] if release else None


def toolkit_advice() -> str:
    """The toolkit to install, in words."""
    release = torch.version.cuda
    return f"NVIDIA's CUDA toolkit {release}, which torch {torch.__version__} is for" if release else "a CUDA toolkit"


def missing_tools() -> str | None:
    """Why nothing can be compiled here, with what to do; None if nvcc and ninja are there."""
    if find_nvcc() is None:
        return f"there is no nvcc in {_cuda_home()}/bin: install {toolkit_advice()}, or set CUDA_HOME to its folder"
    if shutil.which("ninja") is None:
        return "there is no ninja: pip install ninja"
    return None


def is_up_to_date(folder: Path) -> bool:
    """Whether flashinfer would load the module in this cache folder without compiling."""
    from flashinfer.jit.cpp_ext import build_common_cflags, get_cuda_path

    try:
        home, rules = get_cuda_path(), (folder / "build.ninja").read_text(encoding="utf-8")
        same = f"cuda_home = {home}\n" in rules and all(flag in rules for flag in build_common_cflags(home))
        return same and "no work to do" in _dry_run(folder)
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return False


def _dry_run(folder: Path) -> str:
    command = ["ninja", "-n", "-C", str(folder), "-f", "build.ninja"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS_FOR_AN_ANSWER).stdout
