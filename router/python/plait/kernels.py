"""`plait kernels`: what the GPU's attention has compiled for a model, and compiling it ahead.

The work is done by the worker's package in a process of its own, since it needs torch and this one does without.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from plait.errors import SettingsError
from plait.model_files import find_model
from plait.settings import PageSettings, PageSize, ProcessSettings, RankCount, Setting

ACTIONS = ("list", "build")


class NeedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `plait serve` will be told."""

    dtype: Annotated[
        Literal["auto", "bfloat16", "float16"], Setting("number format of weights and KV; auto is bfloat16 on a GPU")
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"], Setting("type of cached keys and values, as for serve", ("--kv-dtype",))
    ] = "auto"
    page_size: Annotated[PageSize, Setting("tokens in a page, a power of two", ("--block-size",))] = (
        PageSettings().page_size
    )
    tp: Annotated[
        RankCount, Setting("workers that divide the model among them", ("--tensor-parallel-size", "--tp-size"))
    ] = ProcessSettings().tp
    arch: Annotated[
        str | None,
        Setting("compute capability to build for, such as 9.0 for an H100 or H200", unset="this machine's GPU"),
    ] = None


class KernelsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `plait kernels` is told."""

    need: NeedSettings = NeedSettings()


def compiler_folders() -> dict[str, list[Path]]:
    """What pip installed of that flashinfer compiles and loads modules with, by the variable that finds it.

    Ninja lies beside Python. A small CUDA toolkit has no curand, whose header CUTLASS includes: torch's packages have
    it. It goes by a variable of the host compiler, who looks there last. A flag would be part of every command, and
    what was compiled by another command is compiled again.
    """
    nvidia = importlib.util.find_spec("nvidia")
    packages = (nvidia.submodule_search_locations if nvidia else None) or []
    headers = [found.parent for package in packages for found in Path(package).glob("*/include/curand_kernel.h")]
    return {"PATH": [Path(sysconfig.get_path("scripts"))], "CPLUS_INCLUDE_PATH": headers}


def run_kernels(action: str, model: str | None, need: NeedSettings) -> int:
    """One of `ACTIONS` for a model; the exit code. Raises `StartError` where there is no such model or no worker."""
    if importlib.util.find_spec("plait_worker") is None:
        raise SettingsError("the worker is not installed here, which GPU modules belong to: pip install plait-worker")
    words = ["--model", str(find_model(model).path), "--dtype", need.dtype, "--page-size", str(need.page_size)]
    words += [
        "--kv-cache-dtype",
        need.kv_cache_dtype,
        "--tp",
        str(need.tp),
        *(["--arch", need.arch] if need.arch is not None else []),
    ]
    return subprocess.call([sys.executable, "-m", "plait_worker.kernels_command", action, *words])
