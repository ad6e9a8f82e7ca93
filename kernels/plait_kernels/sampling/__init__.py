"""Sampling tokens from logits, many rows at once, each with its own parameters.

The filters apply in the order temperature, top-k, top-p, min-p, as in Hugging Face's generate. (vLLM applies
min-p before top-k and top-p, which gives a smaller nucleus where all three are set.) Everything that depends on
order, greedy choice and ranks too, breaks ties by the lower token id, so that a row gives the same token in any batch.

A row without a softmax (``reference.is_distribution``) gives ``NO_TOKEN``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait_kernels.backends import Backend, Call, Op, of_dtype, on_device
from plait_kernels.cpu import library
from plait_kernels.nvrtc import unusable_reason
from plait_kernels.sampling import cuda
from plait_kernels.sampling.adjust import CLOSED, Adjustments
from plait_kernels.sampling.logprobs import TokenScores, score_tokens
from plait_kernels.sampling.philox import philox4x32
from plait_kernels.sampling.reference import NO_TOKEN, Filters


def _is_compiled(_call: Call) -> str | None:
    return None if library.open_library() is not None else "is not compiled: install plait-kernels again"


def _compiles(call: Call) -> str | None:
    return unusable_reason(call.device)


_CPU = Backend("cpu", (on_device("cpu"), of_dtype(torch.float32), _is_compiled))
_CUDA = Backend("cuda", (on_device("cuda"), of_dtype(torch.bfloat16, torch.float16), cuda.unsupported_reason))
_REFERENCE = Backend("checked_reference")
_sample_greedy = Op(__name__, "sample_greedy", Backend("triton", (on_device("cuda"),)), _CPU, _REFERENCE)
_sample_random = Op(__name__, "sample_random", _CPU, _CUDA, _REFERENCE)
_sample_filtered = Op(__name__, "sample_filtered", _CPU, _CUDA, _REFERENCE)
"""The size of a call is the stride between a row's logits."""
_adjust_logits = Op(__name__, "adjust_logits", _CPU, _CUDA, Backend("adjust"))
"""The size of a call is the stride between a row's logits."""
_NUMPY = Backend("numpy_mask", (on_device("cpu"), of_dtype(torch.float32)))
"""For a host without the compiled kernels."""
_mask_logits = Op(__name__, "mask_logits", _CPU, _NUMPY, _CUDA, Backend("mask"))
"""The size of a call is the stride between a row's logits."""
_uniform = Op(__name__, "uniform", Backend("cuda", (on_device("cuda"), _compiles)), Backend("philox"))


def adjust_logits(logits_SV: Tensor, changes: Adjustments) -> Tensor:
    """New logits of the same dtype with each row's penalties, biases and allowed tokens: contiguous ``[S, V]``."""
    adjusted_SV: Tensor = _adjust_logits(logits_SV, logits_SV.stride(1))(logits_SV, changes)
    return adjusted_SV


def mask_logits(logits_SV: Tensor, masks_MW: Tensor, mask_S: Tensor) -> Tensor:
    """New logits of the same dtype in which only tokens of the row's mask are left: contiguous ``[S, V]``.

    Bit t % 32 of word t // 32 of a mask, int32 ``[M, W]``, allows token t; ``mask_S`` int64 are rows of the masks.
    """
    masked_SV: Tensor = _mask_logits(logits_SV, logits_SV.stride(1))(logits_SV, masks_MW, mask_S)
    return masked_SV


def sample_greedy(logits_SV: Tensor) -> Tensor:
    """The id of each row's largest logit (float32 on a CPU), the lowest of equals: int64 ``[S]``."""
    ids_S: Tensor = _sample_greedy(logits_SV)(logits_SV)
    return ids_S


def sample_random(logits_SV: Tensor, temperature_S: Tensor, min_p_S: Tensor, uniform_S: Tensor) -> Tensor:
    """One token a row from softmax(logits / temperature) after min-p: int64 ``[S]``."""
    ids_S: Tensor = _sample_random(logits_SV, logits_SV.stride(1))(logits_SV, temperature_S, min_p_S, uniform_S)
    return ids_S


def sample_filtered(logits_SV: Tensor, temperature_S: Tensor, filters: Filters, uniform_S: Tensor) -> Tensor:
    """The same after top-k, top-p and min-p; the cumulative probability runs over tokens from best to worst."""
    ids_S: Tensor = _sample_filtered(logits_SV, logits_SV.stride(1))(logits_SV, temperature_S, filters, uniform_S)
    return ids_S


def uniform(seed_N: Tensor, index_N: Tensor) -> Tensor:
    """One number in [0, 1), float64 ``[N]``, for output token ``index_N`` of a request seeded with ``seed_N``."""
    uniform_N: Tensor = _uniform(seed_N)(seed_N, index_N)
    return uniform_N


__all__ = [
    "CLOSED",
    "NO_TOKEN",
    "Adjustments",
    "Filters",
    "TokenScores",
    "adjust_logits",
    "mask_logits",
    "philox4x32",
    "sample_filtered",
    "sample_greedy",
    "sample_random",
    "score_tokens",
    "uniform",
]
