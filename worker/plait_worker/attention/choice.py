"""Which backend a rank attends with: the one that was asked for, or the fastest of those that are right here."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any

import torch
from plait_proto import ExitCode

from plait_worker.attention import AttentionBackend, AttentionShape, LatentShape, StepAttention
from plait_worker.attention.cpu import cpu_attention
from plait_worker.attention.small_problem import SmallProblem
from plait_worker.attention.torch import TorchAttention
from plait_worker.failure import Failure

_log = logging.getLogger(__name__)

GPU_BACKENDS = {"triton": "TritonDecode", "trtllm_mha": "TrtllmMha", "flashinfer": "Flashinfer"}
"""Module of ``plait_worker.attention`` and class of each; all are for compute capability 9.0."""
_CAPABILITY = (9, 0)
_DTYPES = (torch.bfloat16, torch.float16)
# bfloat16 rounds to 2**-8; two right kernels differ by a few of these, wrong ones by the whole.
_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class Need:
    """What a backend is made for."""

    shape: AttentionShape | LatentShape
    page_size: int
    """In tokens."""
    context_chunk: int
    """Cached tokens that latent attention expands at a time."""
    max_tokens: int
    """Of one step."""
    device: torch.device


@dataclass(frozen=True, slots=True)
class Trial:
    """A backend that was right on the small problem, with what one layer of it took."""

    backend: AttentionBackend[StepAttention]
    decode_us: float
    prefill_us: float


def choose_attention(name: str, need: Need) -> AttentionBackend[Any]:
    """The backend of this name, or for ``auto`` the fastest.

    Raises ``Failure`` of code HARDWARE where the one that was asked for cannot run here or is wrong.
    """
    if need.device.type == "cpu" and name == "auto":
        return cpu_attention(need.shape, need.page_size, need.context_chunk)
    if isinstance(need.shape, LatentShape) and need.device.type == "cpu" and name == "torch":
        return cpu_attention(need.shape, need.page_size, need.context_chunk)
    if isinstance(need.shape, LatentShape):
        raise Failure(ExitCode.HARDWARE, "models with latent attention do not run on GPUs yet; add --device cpu")
    if name == "torch":
        return TorchAttention(need.shape, need.page_size)
    if name != "auto":
        outcome = try_backend(name, need)
        if isinstance(outcome, Trial):
            return outcome.backend
        raise Failure(ExitCode.HARDWARE, f"--attention-backend {name}: {outcome}; auto takes one that runs here")
    return _fastest(need, need.shape)


def _fastest(need: Need, shape: AttentionShape) -> AttentionBackend[StepAttention]:
    """By the sum of both times, shown in the log; torch where no other runs."""
    trials: list[Trial] = []
    for name in GPU_BACKENDS:
        outcome = try_backend(name, need)
        if isinstance(outcome, Trial):
            trials.append(outcome)
            _log.info("attention %s: decode %.0f us, prefill %.0f us", name, outcome.decode_us, outcome.prefill_us)
        else:
            _log.info("attention %s is out: %s", name, outcome)
    if not trials:
        _log.warning("attention torch: nothing faster runs here; steps take several times longer than they could")
        return TorchAttention(shape, need.page_size)
    return min(trials, key=lambda trial: trial.decode_us + trial.prefill_us).backend


@torch.inference_mode()
def try_backend(name: str, need: Need) -> Trial | str:
    """The backend with its times, or why it cannot be used.

    Some kernels run on hardware that they were not made for and return zeros, so each is held against torch's.
    """
    if need.device.type != "cuda" or torch.cuda.get_device_capability(need.device) != _CAPABILITY:
        return f"it needs a GPU of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} (H100, H200)"
    if isinstance(need.shape, LatentShape):
        return "it has no latent attention"
    if need.shape.dtype not in _DTYPES:
        return f"it computes in bfloat16 or float16, not {str(need.shape.dtype).removeprefix('torch.')}"
    try:
        backend = _make(name, need)
        problem = SmallProblem(need.shape, need.page_size, need.device)
        error = max(problem.error(backend, rows) for rows in (problem.decode, problem.prefill))
        if not error <= _TOLERANCE:
            return f"its result is off by {error:.3f} of the largest value"
        return Trial(backend, problem.us(backend, problem.decode), problem.us(backend, problem.prefill))
    except ImportError as failure:
        return f"{failure.name} is not installed"
    except (RuntimeError, ValueError, AssertionError) as failure:
        return f"it failed on a small problem: {(str(failure) or repr(failure)).splitlines()[0]}"


def _make(name: str, need: Need) -> AttentionBackend[StepAttention]:
    module = importlib.import_module(f"plait_worker.attention.{name}")
    num_tokens = max(need.max_tokens, SmallProblem.num_tokens(need.page_size))
    backend: AttentionBackend[StepAttention] = getattr(module, GPU_BACKENDS[name])(
        need.shape, need.page_size, num_tokens, need.device
    )
    return backend
