"""The reference's sampling for any dtype; a row without a softmax gives ``NO_TOKEN``."""

from __future__ import annotations

from torch import Tensor

from plait_kernels.sampling import reference
from plait_kernels.sampling.reference import NO_TOKEN, Filters, is_distribution


def sample_greedy(logits_SV: Tensor) -> Tensor:
    """See ``plait_kernels.sampling.sample_greedy``."""
    return _checked(reference.sample_greedy(logits_SV), logits_SV)


def sample_random(logits_SV: Tensor, temperature_S: Tensor, min_p_S: Tensor, uniform_S: Tensor) -> Tensor:
    """See ``plait_kernels.sampling.sample_random``."""
    return _checked(reference.sample_random(logits_SV.float(), temperature_S, min_p_S, uniform_S), logits_SV)


def sample_filtered(logits_SV: Tensor, temperature_S: Tensor, filters: Filters, uniform_S: Tensor) -> Tensor:
    """See ``plait_kernels.sampling.sample_filtered``."""
    return _checked(reference.sample_filtered(logits_SV.float(), temperature_S, filters, uniform_S), logits_SV)


def _checked(ids_S: Tensor, logits_SV: Tensor) -> Tensor:
    return ids_S.where(is_distribution(logits_SV), NO_TOKEN)
