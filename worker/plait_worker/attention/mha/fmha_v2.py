"""Prefill rows by TensorRT-LLM's FMHAv2 for Hopper, as flashinfer packs it.

It reads no float8 pages: it gets an upcast copy.

Shapes: T tokens of the prefill rows, H query heads, E elements of a head.
"""

from __future__ import annotations

import torch
from flashinfer.prefill import trtllm_fmha_v2_prefill
from plait_kernels.kv_cache import PageScales
from torch import Tensor

from plait_worker.attention.mha.separate_kernels import PrefillRows
from plait_worker.attention.spec import MhaShape

# Not shared: its tile counter lies at the beginning.
_WORKSPACE_BYTES = 128 << 20


class FmhaV2:
    """The kernel with its workspace."""

    def __init__(self, shape: MhaShape, device: torch.device) -> None:
        """Allocates the workspace."""
        self._shape = shape
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def supports(self, rows: PrefillRows) -> bool:
        """Whether it can read these rows' pages, or a copy of them."""
        return not self._shape.is_fp8 or rows.upcast is not None

    def attend(self, q_THE: Tensor, pages: Tensor, rows: PrefillRows, out_THE: Tensor, scales: PageScales) -> None:
        """See ``SeparateKernels.prefill``; for rows that it takes."""
        shape, lengths, table_PW = self._shape, rows.lengths, rows.table_PW
        if rows.upcast is not None:
            pages, table_PW = rows.upcast.gather(pages, q_THE.dtype), rows.upcast.table_PW
        trtllm_fmha_v2_prefill(
            (q_THE, pages),
            "Q_PAGED_KV_HND",
            self._workspace,
            lengths.kv_P,
            lengths.max_q,
            lengths.max_kv,
            shape.scale * scales.k,
            1.0,
            table_PW.shape[0],
            lengths.ends_q,
            lengths.ends_kv,
            block_tables=table_PW,
            out=out_THE,
        )
        if scales.v != 1:  # the kernel ignores its scale of the values (seen on an H200)
            out_THE *= scales.v
