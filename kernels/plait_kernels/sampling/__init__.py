"""Sampling tokens from logits, many rows at once, each with its own parameters.

The filters apply in the order temperature, top-k, top-p, min-p, as in Hugging Face's generate. (vLLM applies
min-p before top-k and top-p, which gives a smaller nucleus where all three are set.) Everything that depends on
order, greedy choice and ranks too, breaks ties by the lower token id, so that a row gives the same token in any batch.
"""

from __future__ import annotations

from torch import Tensor

from plait_kernels.backends import triton_backend
from plait_kernels.sampling import sample
from plait_kernels.sampling.logprobs import TokenScores, score_tokens
from plait_kernels.sampling.philox import philox4x32
from plait_kernels.sampling.reference import NO_TOKEN, Filters
from plait_kernels.sampling.sample import sample_filtered, sample_random, uniform


def sample_greedy(logits_SV: Tensor) -> Tensor:
    """The id of each row's largest logit (on a CPU float32), the lowest where several are: int64 ``[S]``.

    As all picks it gives ``NO_TOKEN`` on a CPU where a row is no distribution.
    """
    backend = triton_backend(__name__) if logits_SV.is_cuda else sample
    ids_S: Tensor = backend.sample_greedy(logits_SV)
    return ids_S


__all__ = [
    "NO_TOKEN",
    "Filters",
    "TokenScores",
    "philox4x32",
    "sample_filtered",
    "sample_greedy",
    "sample_random",
    "score_tokens",
    "uniform",
]
