"""Rope over adjacent pairs of a head's last elements, as DeepSeek-V4 has it.

Shapes: N rows, H heads, D elements of a head, F rotated pairs, the last ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait_worker.layers.rope import rope_frequencies
from plait_worker.model_config import RopeConfig


class PairRope:
    """Rotations of positions."""

    def __init__(self, config: RopeConfig, rope_dim: int, device: torch.device) -> None:
        """Compute the scaled frequencies once."""
        self.frequencies_F = rope_frequencies(config, rope_dim).to(device)

    def rotations(self, positions_N: Tensor) -> Tensor:
        """complex64 ``[N, F]``."""
        angles_NF = positions_N[:, None].float() * self.frequencies_F
        return torch.complex(angles_NF.cos(), angles_NF.sin())


def rotate_last(x_NHD: Tensor, rotations_NF: Tensor) -> Tensor:
    """The last elements rotated, in float32; in the dtype of ``x``, which is changed in place if that is float32."""
    num_pairs = rotations_NF.shape[1]
    last = x_NHD[..., -2 * num_pairs :].unflatten(-1, (num_pairs, 2))
    pairs = torch.view_as_complex(last.float().contiguous())
    last.copy_(torch.view_as_real(pairs * rotations_NF[:, None]))
    return x_NHD
