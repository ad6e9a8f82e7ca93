"""Which backend a rank attends with: the one that was asked for, or the fastest of those that are right here."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from plait_proto import ExitCode

from plait_worker.attention.backend import AttentionBackend
from plait_worker.attention.cpu import cpu_attention
from plait_worker.attention.jit.compilers import find_nvcc
from plait_worker.attention.jit.modules import backend_modules
from plait_worker.attention.mha.torch_mha import TorchMha
from plait_worker.attention.mla.torch_mla import TorchMla
from plait_worker.attention.registry import BackendRequirements, BackendSpec, find, names
from plait_worker.attention.self_check import SelfCheck, self_check
from plait_worker.attention.spec import MhaShape, MlaShape
from plait_worker.device import compute_capability
from plait_worker.errors import WorkerError

_log = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)
# bfloat16 rounds to 2**-8; two right kernels differ by a few of these, wrong ones by the whole.
_TOLERANCE = 0.03
# Over float8 some kernels round queries and the softmax's weights to it too, to 2**-4; over latents, where keys are
# values as well, that comes to a tenth behind the softmax. An ignored scale is off by the half.
_TOLERANCE_FP8, _TOLERANCE_FP8_LATENT = 0.08, 0.2


@cache
def _kernel_failures() -> tuple[type[Exception], ...]:
    """What CUDA, flashinfer and Triton raise where a kernel does not compile or does not fit.

    Asked for only once something was raised: to import Triton costs time, which a CPU's worker need not take.
    """
    try:
        from triton.errors import TritonError
    except ImportError:
        return RuntimeError, OSError, ValueError, AssertionError
    return RuntimeError, OSError, ValueError, AssertionError, TritonError


@dataclass(frozen=True, slots=True)
class Trial:
    """A backend that was right on the small problem, with what one layer of it took."""

    backend: AttentionBackend[Any]
    decode_us: float
    prefill_us: float

    def rank(self) -> tuple[bool, float]:
        """The least is the best: what is launched operation by operation waits for the host."""
        return not self.backend.is_capturable, self.decode_us + self.prefill_us


def choose_attention(name: str, requirements: BackendRequirements) -> AttentionBackend[Any]:
    """The backend of this name, or for ``auto`` the fastest.

    Raises ``WorkerError`` of code HARDWARE where the one that was asked for cannot run here or is wrong.
    """
    if requirements.device.type == "cpu" and name == "auto":
        return cpu_attention(requirements.shape, requirements.page_size, requirements.mla_context_chunk_size)
    if name == "auto":
        return _fastest(requirements)
    if name == "torch":
        return _torch(requirements)
    outcome = try_backend(name, requirements, may_compile=True)
    if isinstance(outcome, str):
        raise WorkerError(ExitCode.HARDWARE, f"--attention-backend {name}: {outcome}; auto takes one that runs here")
    return outcome


def _fastest(requirements: BackendRequirements) -> AttentionBackend[Any]:
    """One whose steps can be captured, then by the sum of both times, shown in the log; torch where no other runs."""
    trials: list[Trial] = []
    capability = compute_capability(requirements.device)
    for name in names(type(requirements.shape), capability) if capability else []:
        if any(trial.backend.is_capturable for trial in trials) and _plans(name, requirements):
            _log.info("attention %s is out: it plans each step on the host, so that none could be captured", name)
            continue
        outcome = try_backend(name, requirements)
        if isinstance(outcome, str):
            _log.info("attention %s is out: %s", name, outcome)
            continue
        trials.append(_time(outcome, requirements))
        _log.info("attention %s: decode %.0f us, prefill %.0f us", name, trials[-1].decode_us, trials[-1].prefill_us)
    if trials:
        return min(trials, key=Trial.rank).backend
    _log.warning("attention torch: nothing faster runs here; steps take several times longer than they could")
    return _torch(requirements)


def _plans(name: str, requirements: BackendRequirements) -> bool:
    """Whether its steps cannot be captured, as far as that is known without its library."""
    found = find(name, requirements.shape, compute_capability(requirements.device))
    try:
        return not isinstance(found, str) and not found.kind().is_capturable
    except ImportError:
        return False


def _torch(requirements: BackendRequirements) -> TorchMha | TorchMla:
    if isinstance(requirements.shape, MlaShape):
        return TorchMla(
            requirements.shape, requirements.page_size, requirements.mla_context_chunk_size, requirements.device
        )
    return TorchMha(requirements.shape, requirements.page_size)


@torch.inference_mode()
def try_backend(
    name: str, requirements: BackendRequirements, *, may_compile: bool = False
) -> AttentionBackend[Any] | str:
    """The backend, or why it cannot be used; ``may_compile`` modules of flashinfer's, which takes minutes.

    Some kernels run on hardware that they were not made for and return zeros, so each is held against torch's.
    """
    found = find(name, requirements.shape, compute_capability(requirements.device))
    if isinstance(found, str):
        return found
    if requirements.shape.dtype not in _DTYPES:
        return f"it computes in bfloat16 or float16, not {str(requirements.shape.dtype).removeprefix('torch.')}"
    try:
        found.validate(requirements)
        if reason := _unbuilt(found, requirements, may_compile):
            return reason
        backend = _make(found, requirements)
    except ImportError as failure:
        return f"{failure.name} is not installed"
    except ValueError as rule:
        return str(rule)
    except _kernel_failures() as failure:
        return f"it does not start: {_first_line(failure)}"
    return self_check_error(backend, requirements) or backend


def _unbuilt(found: BackendSpec, requirements: BackendRequirements, may_compile: bool) -> str | None:
    """Why it cannot start, where its modules are neither there nor to be compiled now; compiling is announced."""
    modules = backend_modules(found, requirements.shape, requirements.page_size) if found.needs_modules else []
    missing = [module.name for module in modules if not module.is_ready]
    if not missing:
        return None
    if find_nvcc() is None:
        return (
            f"{len(missing)} of its modules are not built, and there is no nvcc; `plait kernels build` says what to do"
        )
    if not may_compile:
        return f"{len(missing)} of its modules are not built, which takes minutes; `plait kernels build` does it"
    _log.warning(
        "attention %s: compiling %d modules, which takes minutes; `plait kernels build` does it ahead of the start",
        found.name,
        len(missing),
    )
    return None


def _make(found: BackendSpec, requirements: BackendRequirements) -> AttentionBackend[Any]:
    return found.make(requirements, max(requirements.max_tokens, SelfCheck.num_tokens(requirements.page_size)))


def self_check_error(backend: AttentionBackend[Any], requirements: BackendRequirements) -> str | None:
    """What the small problem shows to be wrong with it."""
    try:
        problem = self_check(requirements)
        errors = [problem.error(backend, rows) for rows in (problem.decode, problem.prefill, problem.extends)]
    except _kernel_failures() as failure:
        return f"it failed on a small problem: {_first_line(failure)}"
    wrong = [error for error in errors if not error <= _tolerance(requirements.shape)]  # a NaN is not over it either
    return f"its result is off by {wrong[0]:.3f} of the largest value" if wrong else None


def _tolerance(shape: MhaShape | MlaShape) -> float:
    if shape.cached_dtype == shape.dtype:
        return _TOLERANCE
    return _TOLERANCE_FP8_LATENT if isinstance(shape, MlaShape) else _TOLERANCE_FP8


def _first_line(failure: Exception) -> str:
    return (str(failure) or repr(failure)).splitlines()[0]


@torch.inference_mode()
def _time(backend: AttentionBackend[Any], requirements: BackendRequirements) -> Trial:
    problem = self_check(requirements)
    return Trial(backend, problem.us(backend, problem.decode), problem.us(backend, problem.prefill))
