"""`plait kernels`: list a model's compiled GPU modules, or build them before the first start.

The worker's package does the work in its own process: it needs torch, which this package does without.
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
from plait.setting import Setting
from plait.settings import PAGE_SIZE, PageSize, ProcessSettings, RankCount

ACTIONS = ("list", "build")


class NeedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that `plait serve` will get."""

    dtype: Annotated[
        Literal["auto", "bfloat16", "float16"], Setting("number format of weights and KV; auto is bfloat16 on a GPU")
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"], Setting("type of the KV cache, as for serve", ("--kv-dtype",))
    ] = "auto"
    page_size: Annotated[PageSize, Setting("tokens in a page, a power of two", ("--block-size",))] = PAGE_SIZE
    tp: Annotated[
        RankCount, Setting("tensor parallelism: ranks that share the model", ("--tensor-parallel-size", "--tp-size"))
    ] = ProcessSettings().tp
    arch: Annotated[
        str | None,
        Setting("compute capability to build for, such as 9.0 for an H100 or H200", unset="this machine's GPU"),
    ] = None


class KernelsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `plait kernels`."""

    need: NeedSettings = NeedSettings()


def compiler_folders() -> dict[str, list[Path]]:
    """Folders that flashinfer's compilers need, by environment variable.

    Ninja is installed beside Python. CUTLASS includes a header of curand, which a small CUDA toolkit lacks and torch's
    packages have. The host compiler searches the variable's folders last. A compiler flag instead would change every
    command, and flashinfer would then compile everything again.
    """
    nvidia = importlib.util.find_spec("nvidia")
    packages = (nvidia.submodule_search_locations if nvidia else None) or []
    headers = [found.parent for package in packages for found in Path(package).glob("*/include/curand_kernel.h")]
    return {"PATH": [Path(sysconfig.get_path("scripts"))], "CPLUS_INCLUDE_PATH": headers}


def run_kernels(action: str, model: str | None, need: NeedSettings) -> int:
    """Run one of `ACTIONS`; the exit code. Raises `StartError` if the model or the worker's package is missing."""
    if importlib.util.find_spec("plait_worker") is None:
        raise SettingsError("plait-worker is not installed, which builds GPU modules: pip install plait-worker")
    argv = ["--model", str(find_model(model).path), "--dtype", need.dtype, "--page-size", str(need.page_size)]
    argv += ["--kv-cache-dtype", need.kv_cache_dtype, "--tp", str(need.tp)]
    argv += ["--arch", need.arch] if need.arch is not None else []
    return subprocess.call([sys.executable, "-m", "plait_worker.kernels_command", action, *argv])
