"""TensorRT-LLM's kernels for Hopper, as flashinfer packs them: XQA for decode rows, FMHAv2 for prefill rows.

Shapes: D decode rows, H query heads, E a head's width.
"""

from __future__ import annotations

import torch
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from torch import Tensor

from plait_worker.attention import AttentionShape
from plait_worker.attention.fmha_v2 import DecodeRows, FmhaV2

# Semaphores take the first 8 MiB and must start at zero; the rest is for rows that are split.
_WORKSPACE_BYTES = 136 << 20


class TrtllmMha(FmhaV2):
    """``AttentionBackend`` for compute capability 9.0."""

    name = "trtllm_mha"

    def __init__(self, shape: AttentionShape, page_size: int, max_tokens: int, device: torch.device) -> None:
        """See ``FmhaV2``; allocates XQA's workspace too."""
        super().__init__(shape, page_size, max_tokens, device)
        self.xqa_workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def decode(self, q_DHE: Tensor, pages: Tensor, rows: DecodeRows, out_DHE: Tensor) -> None:
        """XQA; it reads lengths and tables on the device."""
        trtllm_batch_decode_with_kv_cache(
            q_DHE,
            pages,
            self.xqa_workspace,
            rows.table_DW,
            rows.lengths_D,
            rows.table_DW.shape[1] * self.page_size,
            bmm1_scale=self.shape.scale * self.shape.scales.k,
            bmm2_scale=self.shape.scales.v,
            out=out_DHE,
            backend="xqa",
        )
