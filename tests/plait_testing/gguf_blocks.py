"""Random GGUF blocks, of the types that the library cannot make too."""

from __future__ import annotations

import numpy as np
import torch
from plait_kernels.linear import BlockWeight
from plait_kernels.linear.blocks import KINDS

_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where a block has its float16 values."""


def random_blocks(kind: str, outputs: int, inputs: int, seed: int = 0) -> BlockWeight:
    """All bits of the quants and small scales at random; values of a matrix's usual size."""
    sizes, r = KINDS[kind], np.random.default_rng(seed)
    blocks = r.integers(0, 256, (outputs, inputs // sizes.inputs, sizes.file_bytes), np.uint8)
    for place in _HALVES[kind]:
        scales = r.standard_normal(blocks.shape[:2]).astype(np.float16) / (1000 if sizes.inputs == 256 else 20)
        blocks[..., place : place + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return BlockWeight(kind, torch.from_numpy(blocks.reshape(outputs, -1)))
