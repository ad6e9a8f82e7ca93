"""Rope: frequencies of the rotary embedding, scaled as the model's configuration says.

With partial rope the remaining pairs of a head have frequency 0: cosine 1 and sine 0 leave them bit for bit.

Shapes: F = head_dim / 2 frequencies, T tokens, D the head's width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from plait_kernels.rope import rope_tables
from torch import Tensor

from plait_worker.model_config import FactorsRope, LinearRope, Llama3Rope, RopeConfig, YarnRope


class Rope:
    """Makes the rotation tables of a step."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        """Compute the scaled frequencies once."""
        rotary = rope_frequencies(config, config.rotary_dim or head_dim)
        num_fixed = head_dim // 2 - len(rotary)
        scale = config.scaling.attention_factor if isinstance(config.scaling, YarnRope) else 1.0
        self.frequencies_F = F.pad(rotary, (0, num_fixed)).to(device)
        self.scale_F = F.pad(torch.full_like(rotary, scale), (0, num_fixed), value=1.0).to(device)

    def tables(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """float32 ``cos_T1D, sin_T1D`` for ``plait_kernels.rope.apply_rope``."""
        return rope_tables(positions_T, self.frequencies_F, self.scale_F)


def rope_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position, float32 ``[F]``, highest first."""
    frequencies_F = 1.0 / config.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    match config.scaling:
        case None:
            return frequencies_F
        case LinearRope(factor):
            return frequencies_F / factor
        case FactorsRope(factors):
            return frequencies_F / torch.tensor(factors)
        case Llama3Rope() as scaling:
            return _llama3(frequencies_F, scaling)
        case YarnRope() as scaling:
            return _yarn(frequencies_F, scaling, config.theta, head_dim)


def _llama3(frequencies_F: Tensor, scaling: Llama3Rope) -> Tensor:
    """Blend by the number of rotations in the original context."""
    rotations_F = frequencies_F * (scaling.original_max_positions / (2 * math.pi))
    kept_F = (rotations_F - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_F = kept_F.clamp(0, 1)
    return frequencies_F * kept_F + frequencies_F / scaling.factor * (1 - kept_F)


def _yarn(frequencies_F: Tensor, scaling: YarnRope, theta: float, head_dim: int) -> Tensor:
    """Keep dimensions with more than ``beta_fast`` rotations, divide those with fewer than ``beta_slow``."""

    def dimension(num_rotations: float) -> float:
        """The dimension that rotates so many times in the original context."""
        return (
            head_dim * math.log(scaling.original_max_positions / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))
        )

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001  # a ramp of no width is a step
    interpolated_F = ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
    return frequencies_F / scaling.factor * interpolated_F + frequencies_F * (1 - interpolated_F)
