"""Sampling on a GPU from 16-bit logits by the kernels of ``sampling.cu``, compiled at their first use.

Shapes: S rows, V vocabulary, N random numbers.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from plait_kernels.backends import Call
from plait_kernels.nvrtc import Kernel, compile_kernels, max_shared_bytes, unusable_reason
from plait_kernels.sampling.adjust import Adjustments
from plait_kernels.sampling.reference import Filters

_SOURCE = Path(__file__).with_name("sampling.cu")
_THREADS = 1024
_UNIFORM_THREADS = 128
_COUNTS_BYTES = 1024 * 47 * 4
_CHUNK = 512


def unsupported_reason(call: Call) -> str | None:
    """Why the kernels do not sample from such logits; ``call.size`` is the stride between a row's logits."""
    if call.size != 1:
        return f"takes rows of adjacent logits, not a stride of {call.size}"
    if (reason := unusable_reason(call.device)) is not None:
        return reason
    return None if _has_room(call.device) else "needs more shared memory for its counts"


def sample_random(logits_SV: Tensor, temperature_S: Tensor, min_p_S: Tensor, uniform_S: Tensor) -> Tensor:
    """See ``plait_kernels.sampling.reference.sample_random``; the logits are rounded already."""
    ids_S = torch.empty(logits_SV.shape[0], dtype=torch.int64, device=logits_SV.device)
    parameters = [value.contiguous() for value in (temperature_S, min_p_S, uniform_S)]
    masses_bytes = -(-logits_SV.shape[1] // _CHUNK) * 8
    _run("sample_random", logits_SV, parameters, ids_S, shared_bytes=masses_bytes)
    return ids_S


def sample_filtered(logits_SV: Tensor, temperature_S: Tensor, filters: Filters, uniform_S: Tensor) -> Tensor:
    """See ``plait_kernels.sampling.reference.sample_filtered``; the logits are rounded already."""
    ids_S = torch.empty(logits_SV.shape[0], dtype=torch.int64, device=logits_SV.device)
    given = (temperature_S, filters.top_k_S, filters.top_p_S, filters.min_p_S, uniform_S)
    _run("sample_filtered", logits_SV, [value.contiguous() for value in given], ids_S, shared_bytes=_COUNTS_BYTES)
    return ids_S


def adjust_logits(logits_SV: Tensor, changes: Adjustments) -> Tensor:
    """See ``plait_kernels.sampling.adjust.adjust_logits``."""
    num_rows, vocab = logits_SV.shape
    adjusted_SV = torch.empty((num_rows, vocab), dtype=logits_SV.dtype, device=logits_SV.device)
    if num_rows:
        given = (changes.counts_RV, changes.rows_S, changes.penalties_S3, changes.ends_S)
        listed = (changes.ids_E, changes.bias_E, changes.only_listed_S)
        kernel = _compile_sampling_kernels(logits_SV.dtype, logits_SV.device)["adjust_logits"]
        parameters = [value.contiguous() for value in (*given, *listed)]
        kernel((num_rows, _THREADS, 0), logits_SV, logits_SV.stride(0), vocab, *parameters, adjusted_SV)
    return adjusted_SV


def mask_logits(logits_SV: Tensor, masks_MW: Tensor, mask_S: Tensor) -> Tensor:
    """See ``plait_kernels.sampling.mask.mask_logits``."""
    num_rows, vocab = logits_SV.shape
    masked_SV = torch.empty((num_rows, vocab), dtype=logits_SV.dtype, device=logits_SV.device)
    if num_rows:
        kernel = _compile_sampling_kernels(logits_SV.dtype, logits_SV.device)["mask_logits"]
        words = (masks_MW.contiguous(), masks_MW.shape[1], mask_S.contiguous())
        kernel((num_rows, _THREADS, 0), logits_SV, logits_SV.stride(0), vocab, *words, masked_SV)
    return masked_SV


def uniform(seed_N: Tensor, index_N: Tensor) -> Tensor:
    """See ``plait_kernels.sampling.philox.uniform``."""
    uniform_N = torch.empty(seed_N.shape[0], dtype=torch.float64, device=seed_N.device)
    if seed_N.shape[0]:
        kernel = _compile_sampling_kernels(torch.bfloat16, seed_N.device)["uniform"]
        shape = (-(-seed_N.shape[0] // _UNIFORM_THREADS), _UNIFORM_THREADS, 0)
        kernel(shape, seed_N.contiguous(), index_N.contiguous(), seed_N.shape[0], uniform_N)
    return uniform_N


def _run(name: str, logits_SV: Tensor, parameters: list[Tensor], ids_S: Tensor, shared_bytes: int) -> None:
    num_rows, vocab = logits_SV.shape
    if num_rows:
        kernel = _compile_sampling_kernels(logits_SV.dtype, logits_SV.device)[name]
        kernel((num_rows, _THREADS, shared_bytes), logits_SV, logits_SV.stride(0), vocab, *parameters, ids_S)


@functools.cache
def _has_room(device: torch.device) -> bool:
    return max_shared_bytes(device) >= _COUNTS_BYTES + 4096


@functools.cache
def _compile_sampling_kernels(dtype: torch.dtype, device: torch.device) -> dict[str, Kernel]:
    defines = ("IS_HALF",) if dtype == torch.float16 else ()
    names = ("sample_filtered", "sample_random", "adjust_logits", "mask_logits", "uniform")
    return compile_kernels(_SOURCE, names, defines, device)
