"""The door to sampling tokens: which backend takes a call. The contracts are the reference's.

A row that is no distribution (``reference.is_distribution``) gives ``NO_TOKEN`` on a CPU. On a GPU, where nobody looks
at a token before it is the next step's input, it gives some token of the vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from plait_kernels.cpu import library as cpu
from plait_kernels.nvrtc import can_compile
from plait_kernels.sampling import cuda, native, philox, reference
from plait_kernels.sampling.reference import NO_TOKEN, Filters, is_distribution


def sample_greedy(logits_SV: Tensor) -> Tensor:
    """The id of each row's largest logit, the lowest where several are: int64 ``[S]``."""
    if cpu.takes(logits_SV):
        return native.sample_greedy(logits_SV)
    return _known(reference.sample_greedy(logits_SV), logits_SV)


def sample_random(logits_SV: Tensor, temperature_S: Tensor, min_p_S: Tensor, uniform_S: Tensor) -> Tensor:
    """One token a row from softmax(logits / temperature) after min-p: int64 ``[S]``."""
    if cpu.takes(logits_SV):
        return native.sample_random(logits_SV, temperature_S, min_p_S, uniform_S)
    if cuda.takes(logits_SV):
        return cuda.sample_random(logits_SV, temperature_S, min_p_S, uniform_S)
    return _known(reference.sample_random(logits_SV.float(), temperature_S, min_p_S, uniform_S), logits_SV)


def sample_filtered(logits_SV: Tensor, temperature_S: Tensor, filters: Filters, uniform_S: Tensor) -> Tensor:
    """The same after top-k, top-p and min-p; the cumulative probability runs over tokens from best to worst."""
    if cpu.takes(logits_SV):
        return native.sample_filtered(logits_SV, temperature_S, filters, uniform_S)
    if cuda.takes(logits_SV):
        return cuda.sample_filtered(logits_SV, temperature_S, filters, uniform_S)
    return _known(reference.sample_filtered(logits_SV.float(), temperature_S, filters, uniform_S), logits_SV)


def _known(ids_S: Tensor, logits_SV: Tensor) -> Tensor:
    """The reference's picks, on a CPU without those of rows that are no distribution."""
    return ids_S if logits_SV.is_cuda else ids_S.where(is_distribution(logits_SV), NO_TOKEN)


def uniform(seed_N: Tensor, index_N: Tensor) -> Tensor:
    """One number in [0, 1), float64 ``[N]``, for output token ``index_N`` of a request seeded with ``seed_N``."""
    return cuda.uniform(seed_N, index_N) if seed_N.is_cuda and can_compile() else philox.uniform(seed_N, index_N)
