"""Choice of the attention backends: the one asked for, or the fastest that passes the self-check."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from plait_proto import ExitCode

from plait_worker.attention.backend import AttentionBackend, BackendRequirements
from plait_worker.attention.jit.compilers import find_nvcc
from plait_worker.attention.model_attention import ModelAttention
from plait_worker.attention.registry import KINDS, BackendSpec, find, names
from plait_worker.attention.self_check import SelfCheck
from plait_worker.attention.spec import AttentionSpec
from plait_worker.device import compute_capability
from plait_worker.errors import WorkerError
from plait_worker.parallel import Parallel

Requirements = BackendRequirements[Any]

_log = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)
# bfloat16 rounds to 2**-8: correct kernels differ by a few of these, wrong ones by the whole value.
_TOLERANCE = 0.03
_CLOSE = 1.1
"""Times a layer's attention by itself: less between two says nothing about steps, where kernels overlap."""


@cache
def _kernel_error_types() -> tuple[type[Exception], ...]:
    """What CUDA, flashinfer and Triton raise if a kernel does not compile or does not fit.

    Called only after something was raised: importing Triton takes time that a CPU worker need not spend.
    """
    try:
        from triton.errors import TritonError
    except ImportError:
        return RuntimeError, OSError, ValueError, AssertionError
    return RuntimeError, OSError, ValueError, AssertionError, TritonError


@dataclass(frozen=True, slots=True)
class Timing:
    """A backend that passed the self-check, and the time of one layer, for four steps."""

    backend: AttentionBackend[Any]
    decode_us: float
    short_decode_us: float
    """Of rows with short contexts."""
    lone_decode_us: float
    """Of one row: what one user waits for."""
    prefill_us: float

    @property
    def total_us(self) -> float:
        """Of all four."""
        return self.decode_us + self.short_decode_us + self.lone_decode_us + self.prefill_us

    def rank(self) -> tuple[bool, float]:
        """The smallest is best. A backend without CUDA graphs comes last, since its kernels wait for the host."""
        return not self.backend.is_capturable, self.total_us

    def is_close_to(self, best: Timing) -> bool:
        """Whether it is as good as the best, as far as the times tell."""
        return self.rank()[0] == best.rank()[0] and self.total_us <= _CLOSE * best.total_us


def choose_attention(
    name: str, requirements: Sequence[Requirements], parallel: Parallel | None = None
) -> ModelAttention:
    """A backend for each of a model's distinct specs, in the order of ``requirements``.

    Raises as ``choose_backend`` does.
    """
    return ModelAttention([choose_backend(name, each, parallel) for each in requirements])


def choose_backend(name: str, requirements: Requirements, parallel: Parallel | None = None) -> AttentionBackend[Any]:
    """The backend of this name, or for ``auto`` the fastest, the same on every rank.

    Raises ``WorkerError`` with code HARDWARE if the named one cannot run here or fails the self-check.
    """
    if name == "torch":
        return KINDS[requirements.spec.kind].torch(requirements)
    if name != "auto":
        return _backend_by_name(name, requirements)
    if requirements.device.type == "cpu":
        return _cpu_backend(requirements)
    return _fastest_of_first_rank(requirements, parallel or Parallel())


def _backend_by_name(name: str, requirements: Requirements) -> AttentionBackend[Any]:
    outcome = try_backend(name, requirements, may_compile=True)
    if isinstance(outcome, str):
        raise WorkerError(ExitCode.HARDWARE, f"--attention-backend {name}: {outcome}; auto takes one that runs here")
    return outcome


def _cpu_backend(requirements: Requirements) -> AttentionBackend[Any]:
    """The compiled kernels if they take the spec; else torch. The log says which."""
    kind = KINDS[requirements.spec.kind]
    has_kernels = kind.cpu is not None and kind.cpu.supports(requirements.spec)
    chosen = (kind.cpu if kind.cpu is not None and has_kernels else kind.torch)(requirements)
    _log.info("attention backend: %s", type(chosen).__name__)
    return chosen


def _fastest_of_first_rank(requirements: Requirements, parallel: Parallel) -> AttentionBackend[Any]:
    """Rank 0 broadcasts the name that it measured as the fastest: times differ between ranks, results must not.

    All ranks measure at once, or the others would load the kernels only after rank 0 has: seconds of the start.
    """
    if parallel.world == 1:
        return _fastest(requirements, logging.INFO)
    capability = compute_capability(requirements.device)
    known = [*(names(requirements.spec.kind, capability) if capability else []), "torch"]
    fastest = _fastest(requirements, logging.INFO if parallel.rank == 0 else logging.DEBUG)
    index = parallel.broadcast(torch.tensor(known.index(fastest.name)))
    chosen = known[int(index)]
    return fastest if fastest.name == chosen else choose_backend(chosen, requirements)


def _fastest(requirements: Requirements, level: int) -> AttentionBackend[Any]:
    """The fastest that can be captured, else the fastest, else torch; the log shows the times, at this level.

    Of those that are about as fast it is the registry's first.
    """
    timings: list[Timing] = []
    capability = compute_capability(requirements.device)
    for name in names(requirements.spec.kind, capability) if capability else []:
        if any(timing.backend.is_capturable for timing in timings) and _plans(name, requirements):
            skipped = "attention backend %s is skipped: it plans each step on the host and cannot use CUDA graphs"
            _log.log(level, skipped, name)
            continue
        outcome = try_backend(name, requirements)
        if isinstance(outcome, str):
            _log.log(level, "attention backend %s is skipped: %s", name, outcome)
            continue
        timings.append(_time(outcome, requirements))
        _log.log(
            level,
            "attention backend %s: decode %.0f us, with short contexts %.0f us, of one row %.0f us, prefill %.0f us",
            name,
            timings[-1].decode_us,
            timings[-1].short_decode_us,
            timings[-1].lone_decode_us,
            timings[-1].prefill_us,
        )
    if timings:
        best = min(timings, key=Timing.rank)
        return next(timing.backend for timing in timings if timing.is_close_to(best))
    _log.warning("attention backend torch: no faster one runs here; expect steps to take several times longer")
    return KINDS[requirements.spec.kind].torch(requirements)


def _plans(name: str, requirements: Requirements) -> bool:
    """Whether it plans on the host; False if its library is missing."""
    found = find(name, requirements.spec, compute_capability(requirements.device))
    try:
        return not isinstance(found, str) and not found.load().is_capturable
    except ImportError:
        return False


@torch.inference_mode()
def try_backend(name: str, requirements: Requirements, *, may_compile: bool = False) -> AttentionBackend[Any] | str:
    """The backend, or why it cannot be used; ``may_compile`` lets it compile flashinfer modules, which takes minutes.

    Some kernels run on unsupported hardware and return zeros, so each is compared with torch.
    """
    found = find(name, requirements.spec, compute_capability(requirements.device))
    if isinstance(found, str):
        return found
    if requirements.spec.dtype not in _DTYPES:
        return f"it computes in bfloat16 or float16, not {str(requirements.spec.dtype).removeprefix('torch.')}"
    try:
        found.validate(requirements)
        if reason := _missing_modules_reason(found, requirements, may_compile):
            return reason
        backend = _make(found, requirements)
    except ImportError as failure:
        return f"{failure.name} is not installed"
    except ValueError as rule:
        return str(rule)
    except _kernel_error_types() as failure:
        return f"it does not start: {_first_line(failure)}"
    return self_check_error(backend, requirements) or backend


def _missing_modules_reason(found: BackendSpec, requirements: Requirements, may_compile: bool) -> str | None:
    """Why it cannot start without compiling modules; None if it can, or if they are compiled now, which is logged."""
    modules = found.modules(requirements.spec, requirements.page_size) if found.needs_modules else []
    missing = [module.name for module in modules if not module.is_ready]
    if not missing:
        return None
    if find_nvcc() is None:
        return (
            f"{len(missing)} of its modules are not built, and there is no nvcc; run `plait kernels build` for advice"
        )
    if not may_compile:
        return f"{len(missing)} of its modules are not built; run `plait kernels build`, which takes minutes"
    _log.warning(
        "attention backend %s: compiling %d modules, which takes minutes; `plait kernels build` does it before a start",
        found.name,
        len(missing),
    )
    return None


def _make(found: BackendSpec, requirements: Requirements) -> AttentionBackend[Any]:
    """Large enough for the self-check's steps."""
    most = max(requirements.max_tokens, SelfCheck.num_tokens(requirements.page_size))
    return found.make(dataclasses.replace(requirements, max_tokens=most))


def self_check_error(backend: AttentionBackend[Any], requirements: Requirements) -> str | None:
    """What the self-check finds wrong; None if it passes."""
    try:
        problem = _self_check(requirements)
        steps = (problem.decode, problem.lone_decode, problem.prefill, problem.extends)
        errors = [problem.error(backend, rows) for rows in steps]
    except _kernel_error_types() as failure:
        return f"it failed the self-check: {_first_line(failure)}"
    wrong = [error for error in errors if not error <= _tolerance(requirements.spec)]  # NaN is an error too
    return f"its result is off by {wrong[0]:.3f} of the largest value" if wrong else None


def _self_check(requirements: Requirements) -> SelfCheck:
    """For the GPU backends of the spec's kind."""
    make = KINDS[requirements.spec.kind].self_check
    if make is None:
        raise AssertionError(f"{requirements.spec.description} has a GPU backend and no self-check")
    return make(requirements)


def _tolerance(spec: AttentionSpec) -> float:
    return _TOLERANCE if spec.cached_dtype == spec.dtype else spec.fp8_tolerance


def _first_line(failure: Exception) -> str:
    return (str(failure) or repr(failure)).splitlines()[0]


@torch.inference_mode()
def _time(backend: AttentionBackend[Any], requirements: Requirements) -> Timing:
    problem = _self_check(requirements)
    steps = (problem.decode, problem.short_decode, problem.lone_decode, problem.prefill)
    return Timing(backend, *(problem.time_us(backend, rows) for rows in steps))
