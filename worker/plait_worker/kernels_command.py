"""``python -m plait_worker.kernels_command {list,build}``: lists and builds a model's GPU modules.

`plait kernels` runs it as a process of its own, since it imports torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from plait_kernels.kv_cache import UNSCALED
from plait_proto import ExitCode
from plait_proto.divided_model import check_divisible

from plait_worker.attention.jit.compilers import cuda_version, find_nvcc, missing_tools
from plait_worker.attention.jit.modules import GpuModule, has_flashinfer, prebuilt_folder
from plait_worker.attention.model_specs import attention_specs
from plait_worker.attention.registry import BLACKWELL, HOPPER, Capability, modules_for
from plait_worker.attention.spec import AttentionSpec
from plait_worker.build_flashinfer import build_modules
from plait_worker.device import compute_capability
from plait_worker.errors import ModelFilesError, WorkerError
from plait_worker.model_config import ModelConfig
from plait_worker.models.loader import choose_dtype, open_checkpoint, open_config
from plait_worker.triton_cache import cache_folder, compiled_kernels

INSTALL = "pip install 'plait-worker[cuda]'"
_KNOWN = HOPPER | BLACKWELL


def main() -> int:
    """Returns the exit code."""
    arguments = _arguments()
    try:
        _run(arguments)
    except WorkerError as failure:
        kind = failure.code.name.lower().replace("_", " ")
        print(f"plait: {kind} error (exit code {failure.code}): {failure.reason}", file=sys.stderr)
        return failure.code
    except KeyboardInterrupt:  # the command line got it too, and reports it
        return 1
    return 0


def _run(arguments: argparse.Namespace) -> None:
    capability = _capability(arguments.arch)
    # Which modules are needed does not depend on the scales.
    config = _config(arguments.model, arguments.tp)
    fp8 = [UNSCALED] * config.num_layers if arguments.kv_cache_dtype == "fp8" else None
    if config.compressed is not None:
        raise WorkerError(
            ExitCode.SETTINGS,
            f"{config.architecture} has no GPU kernels in this version, so there is nothing to build; `plait serve` "
            "runs it with --device cpu",
        )
    # Every rank has as many heads as the first.
    specs = attention_specs(config, 0, arguments.tp, _dtype(arguments.dtype), fp8)
    if not has_flashinfer():
        raise WorkerError(
            ExitCode.SETTINGS,
            f"flashinfer is not installed: run {INSTALL}. Without it MHA prefill uses our slower kernel, and MLA uses "
            "torch",
        )
    modules = _modules(specs, arguments.page_size, capability)
    print(_machine(capability), flush=True)
    num_failed = _build(modules) if arguments.action == "build" else 0
    _print(modules)
    if num_failed:
        raise WorkerError(
            ExitCode.SETTINGS,
            f"{num_failed} of {len(modules)} modules could not be compiled; the reasons and what to do are above",
        )


def _modules(specs: Sequence[AttentionSpec], page_size: int, capability: Capability) -> list[GpuModule]:
    try:
        return modules_for(specs, page_size, capability)
    except ImportError as error:
        raise WorkerError(ExitCode.SETTINGS, f"flashinfer is incomplete: {error}; run {INSTALL}") from error
    except OSError as error:
        raise WorkerError(
            ExitCode.SETTINGS, f"flashinfer cannot write its cache: {error}; set FLASHINFER_WORKSPACE_BASE to a folder"
        ) from error


def _capability(arch: str | None) -> Capability:
    """Of ``--arch``, else of the first GPU."""
    if arch is not None:
        major, _, minor = arch.removesuffix("a").partition(".")
        found = (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
        if found not in _KNOWN:
            known = ", ".join(f"{major}.{minor}" for major, minor in sorted(_KNOWN))
            raise WorkerError(ExitCode.SETTINGS, f"--arch is {arch!r}; allowed: {known}")
        return found
    if not torch.cuda.is_available():
        raise WorkerError(
            ExitCode.HARDWARE,
            f"no NVIDIA GPU is there for torch {torch.__version__}; check the driver with nvidia-smi, or name the GPU "
            "to build for: --arch 9.0 is an H100 or H200. A CPU's kernels were compiled when Plait was installed",
        )
    return compute_capability(torch.device("cuda", 0)) or (0, 0)


def _config(model: str, world: int) -> ModelConfig:
    path = Path(model)
    try:
        config = open_config(path) if path.is_dir() else open_checkpoint(path).config
    except ModelFilesError as error:
        raise WorkerError(ExitCode.MODEL_FILES, str(error)) from error
    try:
        check_divisible(config.divided, world)
    except ValueError as error:
        raise WorkerError(ExitCode.SETTINGS, str(error)) from error
    return config


def _dtype(name: str) -> torch.dtype:
    """Of a GPU's weights: auto is bfloat16, which all supported GPUs have."""
    dtype = choose_dtype("bfloat16" if name == "auto" else name, torch.device("cpu"))
    if dtype == torch.float32:
        raise WorkerError(ExitCode.SETTINGS, "--dtype float32 uses torch attention, which needs no modules")
    return dtype


def _machine(capability: Capability) -> str:
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU here"
    nvcc = find_nvcc()
    compiler = f"{nvcc} of CUDA {cuda_version(nvcc)}" if nvcc else "none, nothing can be built here"
    return (
        f"for compute capability {capability[0]}.{capability[1]} ({gpu}); torch {torch.__version__}; flashinfer "
        f"{importlib.metadata.version('flashinfer-python')}; nvcc: {compiler}"
    )


def _build(modules: list[GpuModule]) -> int:
    """Compile the missing ones; how many failed."""
    wanted = [module for module in modules if not module.is_ready]
    if wanted and (reason := missing_tools()):
        raise WorkerError(
            ExitCode.SETTINGS,
            f"{len(wanted)} modules are to be compiled, but {reason}. Or compile elsewhere with this flashinfer, and "
            f"put each NAME.so of its cache at {prebuilt_folder()}/NAME/. Without them plait serve uses backends that "
            "need none; its log says what is slower",
        )
    return build_modules(wanted) if wanted else 0


def _print(modules: list[GpuModule]) -> None:
    if not modules:
        print("no modules are listed for this GPU: flashinfer compiles them at the first start")
    for module in modules:
        print(f"{module.state:9}{module.name}  ({', '.join(module.backends)})")
    print(_compiled_by_triton())


def _compiled_by_triton() -> str:
    folder = cache_folder()
    if folder is None:
        return "our Triton kernels: Triton is not installed; it comes with torch for GPUs"
    compiled = compiled_kernels(folder)
    return (
        f"our Triton kernels: {len(compiled)} compiled, in {compiled.total()} variants, in {folder}; the first start "
        "compiles what is missing"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="plait kernels")
    parser.add_argument("action", choices=("list", "build"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), required=True)
    parser.add_argument("--page-size", type=int, required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--arch")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
