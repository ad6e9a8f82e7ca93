"""Our own Triton kernel for decode rows, TensorRT-LLM's FMHAv2 for prefill rows.

Shapes: D decode rows, H query heads, E a head's width.
"""

from __future__ import annotations

from plait_kernels.attention import decode_paged
from torch import Tensor

from plait_worker.attention.fmha_v2 import DecodeRows, FmhaV2


class TritonDecode(FmhaV2):
    """``AttentionBackend`` for compute capability 9.0."""

    name = "triton"

    def decode(self, q_DHE: Tensor, pages: Tensor, rows: DecodeRows, out_DHE: Tensor) -> None:
        """Read at the speed of memory from the first page on."""
        decode_paged(q_DHE, pages, rows.table_DW, rows.lengths_D, self.shape.scale, out_DHE, self.shape.scales)
