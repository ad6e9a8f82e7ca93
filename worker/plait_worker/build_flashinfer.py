"""Compiles flashinfer's modules before a start: several at once, with progress. A failure does not stop the others."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch

from plait_worker.attention.jit.compilers import cuda_version, find_nvcc, toolkit_advice
from plait_worker.attention.jit.modules import GpuModule
from plait_worker.machine import free_memory_bytes, num_usable_cores

_SECONDS_BETWEEN_REPORTS = 20.0
# A compiler was seen to use up to 3.5 GiB (fa3's prefill, head_dim 128, nvcc 13.0); few do at the same time.
_COMPILER_BYTES = 3 << 30
# With less than this on a disk, writing failed for want of space.
_FULL_DISK_BYTES = 16 << 20
_TELLS_WHY = re.compile(r"\b(error|fatal|not found|died|killed)\b", re.IGNORECASE)
_ADVICE = {
    "signal 9": "memory ran out: free some, or set MAX_JOBS, the number of files that ninja compiles at once",
    "FLASHINFER_DISABLE_JIT": "unset FLASHINFER_DISABLE_JIT",
    "interrupted": "the next build continues from here",
    ": not found": "install that program (g++ brings c++ and gcc)",
}
_IS_COMMAND = re.compile(r"^\[\d+/\d+\]|^FAILED:|\s-c\s.*\s-o\s|\s-shared\s")


def num_parallel_builds(num_modules: int, num_cores: int, free_bytes: int) -> int:
    """As many modules as memory allows. For each, ninja runs two compilers more than there are cores.

    Some modules have few files, which take minutes each: one module alone leaves cores idle.
    """
    return max(1, min(num_modules, free_bytes // ((num_cores + 2) * _COMPILER_BYTES)))


def build_modules(modules: Sequence[GpuModule]) -> int:
    """Compile at least one module into flashinfer's cache and print progress; how many failed."""
    at_once = num_parallel_builds(len(modules), num_usable_cores(), free_memory_bytes())
    print(f"{len(modules)} modules to compile, {at_once} at once", flush=True)
    jobs = [_Job(f"[{number}/{len(modules)}]", module) for number, module in enumerate(modules, 1)]
    pool = ThreadPoolExecutor(at_once)
    try:
        return _watch(jobs, {pool.submit(job.run) for job in jobs})
    finally:
        pool.shutdown(cancel_futures=True)


def _watch(jobs: Sequence[_Job], pending: set[Future[bool]]) -> int:
    """Print progress now and then; how many failed."""
    began, num_failed = time.perf_counter(), 0
    while pending:
        done, pending = wait(pending, timeout=_SECONDS_BETWEEN_REPORTS, return_when=FIRST_COMPLETED)
        num_failed += sum(not future.result() for future in done)
        if not done:
            files = ", ".join(f"{job.label} {job.files()}" for job in jobs)
            print(f"{time.perf_counter() - began:.0f} s: files compiled: {files}", flush=True)
    return num_failed


@dataclass(frozen=True, slots=True)
class _Job:
    label: str
    module: GpuModule

    def run(self) -> bool:
        """Whether it compiled."""
        print(f"{self.label} compiling {self.module.name} for {', '.join(self.module.backends)}", flush=True)
        began = time.perf_counter()
        try:
            self.module.build()
        except (RuntimeError, OSError) as error:
            why = _find_error_line(error)
            seconds, advice = time.perf_counter() - began, _advice(why, self.module.folder)
            print(f"{self.label} failed after {seconds:.0f} s: {why}; {advice}", flush=True)
            return False
        print(f"{self.label} done in {time.perf_counter() - began:.0f} s", flush=True)
        return True

    def files(self) -> str:
        num_compiled, num_files = self.module.num_files()
        return f"{num_compiled} of {num_files}"


def _find_error_line(error: Exception) -> str:
    """The most telling line of the compiler's or ninja's output."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if _TELLS_WHY.search(line) and not _IS_COMMAND.search(line)]
    return telling[0] if telling else lines[-1] if lines else type(error).__name__


def _advice(why: str, folder: Path) -> str:
    for full in (folder, Path(tempfile.gettempdir())):
        if _free_bytes(full) < _FULL_DISK_BYTES:
            return f"the disk of {full} is full: free some space, or set {_variable_of(full)} to another folder"
    for words, advice in _ADVICE.items():
        if words in why:
            return advice
    nvcc, wanted = find_nvcc(), torch.version.cuda
    release = cuda_version(nvcc) if nvcc else None
    if wanted and (release is None or _version_numbers(release) < _version_numbers(wanted)):
        return f"{nvcc} is of CUDA {release}: install {toolkit_advice()}"
    return "FLASHINFER_JIT_VERBOSE=1 shows all compiler output"


def _version_numbers(release: str) -> list[int]:
    return [int(number) for number in release.split(".")]


def _free_bytes(folder: Path) -> int:
    """Of the disk of the folder, or of its nearest existing parent."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(there).free


def _variable_of(folder: Path) -> str:
    return "TMPDIR" if folder == Path(tempfile.gettempdir()) else "FLASHINFER_WORKSPACE_BASE"
