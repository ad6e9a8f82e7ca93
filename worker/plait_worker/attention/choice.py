"""Which backend a rank attends with: the one that was asked for, or the fastest of those that are right here."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from plait_proto import ExitCode

from plait_worker.attention import AttentionBackend, AttentionShape, LatentShape
from plait_worker.attention.compilers import find_nvcc
from plait_worker.attention.cpu import cpu_attention
from plait_worker.attention.found import Kernels, Need, find, names
from plait_worker.attention.modules import backend_modules
from plait_worker.attention.small_problem import SmallProblem, small_problem
from plait_worker.attention.torch import TorchAttention
from plait_worker.attention.torch_latent import TorchLatentAttention
from plait_worker.device import compute_capability
from plait_worker.failure import Failure

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


def choose_attention(name: str, need: Need) -> AttentionBackend[Any]:
    """The backend of this name, or for ``auto`` the fastest.

    Raises ``Failure`` of code HARDWARE where the one that was asked for cannot run here or is wrong.
    """
    if need.device.type == "cpu" and name == "auto":
        return cpu_attention(need.shape, need.page_size, need.context_chunk)
    if name == "auto":
        return _fastest(need)
    if name == "torch":
        return _torch(need)
    outcome = try_backend(name, need, may_compile=True)
    if isinstance(outcome, str):
        raise Failure(ExitCode.HARDWARE, f"--attention-backend {name}: {outcome}; auto takes one that runs here")
    return outcome


def _fastest(need: Need) -> AttentionBackend[Any]:
    """One whose steps can be captured, then by the sum of both times, shown in the log; torch where no other runs."""
    trials: list[Trial] = []
    capability = compute_capability(need.device)
    for name in names(type(need.shape), capability) if capability else []:
        if any(trial.backend.is_capturable for trial in trials) and _plans(name, need):
            _log.info("attention %s is out: it plans each step on the host, so that none could be captured", name)
            continue
        outcome = try_backend(name, need)
        if isinstance(outcome, str):
            _log.info("attention %s is out: %s", name, outcome)
            continue
        trials.append(_time(outcome, need))
        _log.info("attention %s: decode %.0f us, prefill %.0f us", name, trials[-1].decode_us, trials[-1].prefill_us)
    if trials:
        return min(trials, key=Trial.rank).backend
    _log.warning("attention torch: nothing faster runs here; steps take several times longer than they could")
    return _torch(need)


def _plans(name: str, need: Need) -> bool:
    """Whether its steps cannot be captured, as far as that is known without its library."""
    found = find(name, need.shape, compute_capability(need.device))
    try:
        return not isinstance(found, str) and not found.kind().is_capturable
    except ImportError:
        return False


def _torch(need: Need) -> TorchAttention | TorchLatentAttention:
    if isinstance(need.shape, LatentShape):
        return TorchLatentAttention(need.shape, need.page_size, need.context_chunk, need.device)
    return TorchAttention(need.shape, need.page_size)


@torch.inference_mode()
def try_backend(name: str, need: Need, *, may_compile: bool = False) -> AttentionBackend[Any] | str:
    """The backend, or why it cannot be used; ``may_compile`` modules of flashinfer's, which takes minutes.

    Some kernels run on hardware that they were not made for and return zeros, so each is held against torch's.
    """
    found = find(name, need.shape, compute_capability(need.device))
    if isinstance(found, str):
        return found
    if need.shape.dtype not in _DTYPES:
        return f"it computes in bfloat16 or float16, not {str(need.shape.dtype).removeprefix('torch.')}"
    try:
        found.refuse(need)
        if reason := _unbuilt(found, need, may_compile):
            return reason
        backend = _make(found, need)
    except ImportError as failure:
        return f"{failure.name} is not installed"
    except ValueError as rule:
        return str(rule)
    except _kernel_failures() as failure:
        return f"it does not start: {_first_line(failure)}"
    return what_is_wrong(backend, need) or backend


def _unbuilt(found: Kernels, need: Need, may_compile: bool) -> str | None:
    """Why it cannot start, where its modules are neither there nor to be compiled now; compiling is announced."""
    modules = backend_modules(found, need.shape, need.page_size) if found.needs_modules else []
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


def _make(found: Kernels, need: Need) -> AttentionBackend[Any]:
    return found.make(need, max(need.max_tokens, SmallProblem.num_tokens(need.page_size)))


def what_is_wrong(backend: AttentionBackend[Any], need: Need) -> str | None:
    """What the small problem shows to be wrong with it."""
    try:
        problem = small_problem(need)
        errors = [problem.error(backend, rows) for rows in (problem.decode, problem.prefill, problem.appends)]
    except _kernel_failures() as failure:
        return f"it failed on a small problem: {_first_line(failure)}"
    wrong = [error for error in errors if not error <= _tolerance(need.shape)]  # a NaN is not over it either
    return f"its result is off by {wrong[0]:.3f} of the largest value" if wrong else None


def _tolerance(shape: AttentionShape | LatentShape) -> float:
    if shape.cached_dtype == shape.dtype:
        return _TOLERANCE
    return _TOLERANCE_FP8_LATENT if isinstance(shape, LatentShape) else _TOLERANCE_FP8


def _first_line(failure: Exception) -> str:
    return (str(failure) or repr(failure)).splitlines()[0]


@torch.inference_mode()
def _time(backend: AttentionBackend[Any], need: Need) -> Trial:
    problem = small_problem(need)
    return Trial(backend, problem.us(backend, problem.decode), problem.us(backend, problem.prefill))
