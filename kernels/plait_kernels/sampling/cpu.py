"""Sampling by the compiled CPU kernels.

A row without a softmax (``reference.is_distribution``) gives ``NO_TOKEN``. A filtered row is not sorted: tokens are
counted and weighed in buckets of the logit, and only buckets with a filter's boundary or the sampled token are sorted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait_kernels.cpu import library as cpu
from plait_kernels.sampling.adjust import Adjustments
from plait_kernels.sampling.mask import WORD_BITS
from plait_kernels.sampling.reference import Filters


def sample_greedy(logits_SV: Tensor) -> Tensor:
    """The id of each row's largest logit, the lowest of equals: int64 ``[S]``."""
    cpu.check_tensor(logits_SV, torch.float32)
    logits_SV, ids_S = logits_SV.contiguous(), torch.empty(len(logits_SV), dtype=torch.int64)
    cpu.library().plait_sample_greedy(logits_SV.data_ptr(), *logits_SV.shape, ids_S.data_ptr())
    return ids_S


def sample_random(logits_SV: Tensor, temperature_S: Tensor, min_p_S: Tensor, uniform_S: Tensor) -> Tensor:
    """One token a row from softmax(logits / temperature) after min-p: int64 ``[S]``."""
    _expect(logits_SV, uniform_S, temperature_S, min_p_S)
    kept = [tensor.contiguous() for tensor in (logits_SV, temperature_S, min_p_S, uniform_S)]
    logits, temperature, min_p, uniform = (tensor.data_ptr() for tensor in kept)
    filters = cpu.Filters(temperature=temperature, min_p=min_p, uniform=uniform)
    ids_S = torch.empty(len(logits_SV), dtype=torch.int64)
    cpu.library().plait_sample_random(logits, *logits_SV.shape, filters, ids_S.data_ptr())
    return ids_S


def sample_filtered(logits_SV: Tensor, temperature_S: Tensor, filters: Filters, uniform_S: Tensor) -> Tensor:
    """The same after top-k, top-p and min-p; the cumulative probability runs over tokens from best to worst."""
    _expect(logits_SV, uniform_S, temperature_S, filters.top_p_S, filters.min_p_S)
    cpu.check_tensor(filters.top_k_S, torch.int64, len(logits_SV))
    inputs = (logits_SV, temperature_S, filters.top_k_S, filters.top_p_S, filters.min_p_S, uniform_S)
    kept = [tensor.contiguous() for tensor in inputs]
    logits, *pointers = (tensor.data_ptr() for tensor in kept)
    ids_S = torch.empty(len(logits_SV), dtype=torch.int64)
    cpu.library().plait_sample_filtered(logits, *logits_SV.shape, cpu.Filters(*pointers), ids_S.data_ptr())
    return ids_S


def adjust_logits(logits_SV: Tensor, changes: Adjustments) -> Tensor:
    """See ``plait_kernels.sampling.adjust.adjust_logits``."""
    num_rows, vocab = logits_SV.shape
    cpu.check_tensor(logits_SV, torch.float32)
    cpu.check_tensor(changes.counts_RV, torch.int32, vocab)
    cpu.check_tensor(changes.rows_S, torch.int64, num_rows)
    cpu.check_tensor(changes.penalties_S3, torch.float32, num_rows, 3)
    cpu.check_tensor(changes.ends_S, torch.int64, num_rows)
    cpu.check_tensor(changes.ids_E, torch.int64)
    cpu.check_tensor(changes.bias_E, torch.float32, len(changes.ids_E))
    cpu.check_tensor(changes.only_listed_S, torch.bool, num_rows)
    inputs = (
        changes.counts_RV,
        changes.rows_S,
        changes.penalties_S3,
        changes.ends_S,
        changes.ids_E,
        changes.bias_E,
        changes.only_listed_S,
    )
    kept = [tensor.contiguous() for tensor in inputs]
    logits_SV = logits_SV.contiguous()
    adjusted_SV = torch.empty_like(logits_SV)
    pointers = cpu.Adjustments(*(tensor.data_ptr() for tensor in kept))
    cpu.library().plait_adjust_logits(logits_SV.data_ptr(), *logits_SV.shape, pointers, adjusted_SV.data_ptr())
    return adjusted_SV


def mask_logits(logits_SV: Tensor, masks_MW: Tensor, mask_S: Tensor) -> Tensor:
    """See ``plait_kernels.sampling.mask.mask_logits``."""
    num_rows, vocab = logits_SV.shape
    cpu.check_tensor(logits_SV, torch.float32)
    cpu.check_tensor(masks_MW, torch.int32, -(-vocab // WORD_BITS))
    cpu.check_tensor(mask_S, torch.int64, num_rows)
    if num_rows and not 0 <= int(mask_S.min()) <= int(mask_S.max()) < len(masks_MW):
        raise ValueError(f"masks are numbered 0 to {len(masks_MW) - 1}; the rows ask for {mask_S.tolist()}")
    kept = logits_SV, masks_MW, mask_S = logits_SV.contiguous(), masks_MW.contiguous(), mask_S.contiguous()
    masked_SV = torch.empty_like(logits_SV)
    logits, masks, rows = (tensor.data_ptr() for tensor in kept)
    cpu.library().plait_mask_logits(logits, num_rows, vocab, masks, masks_MW.shape[1], rows, masked_SV.data_ptr())
    return masked_SV


def _expect(logits_SV: Tensor, uniform_S: Tensor, *floats_S: Tensor) -> None:
    cpu.check_tensor(logits_SV, torch.float32)
    cpu.check_tensor(uniform_S, torch.float64, len(logits_SV))
    for each_S in floats_S:
        cpu.check_tensor(each_S, torch.float32, len(logits_SV))
