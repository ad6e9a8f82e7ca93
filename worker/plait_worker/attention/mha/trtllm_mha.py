"""TensorRT-LLM's kernels for Hopper, as flashinfer packs them: XQA for decode rows, FMHAv2 for prefill rows.

Shapes: T tokens of the prefill rows, D decode rows, H query heads, E elements of a head.
"""

from __future__ import annotations

import torch
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from plait_kernels.kv_cache import PageScales
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.mha.fmha_v2 import FmhaV2
from plait_worker.attention.mha.separate_kernels import DecodeRows, PrefillRows, SeparateKernels
from plait_worker.attention.spec import MhaShape, check_no_window

_PAGE_SIZES = (16, 32, 64, 128)
_HEAD_STEP, _MOST_HEAD = 16, 256
"""XQA takes a head_dim that is a multiple of the first, FMHAv2 one up to the second."""
# The first 8 MiB are semaphores, which must start at zero; the rest is for split-KV rows.
_WORKSPACE_BYTES = 136 << 20


class TrtllmMha(SeparateKernels):
    """``AttentionBackend`` for compute capability 9.0."""

    name = "trtllm_mha"

    def __init__(self, requirements: BackendRequirements[MhaShape]) -> None:
        """See ``SeparateKernels``; allocates the workspaces too."""
        super().__init__(requirements)
        self.upcasts_fp8 = self.shape.is_fp8
        self._fmha_v2 = FmhaV2(self.shape, requirements.device)
        self.xqa_workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=requirements.device)

    @staticmethod
    def validate(requirements: BackendRequirements[MhaShape]) -> None:
        """See ``SeparateKernels``."""
        shape, page_size = requirements.spec, requirements.page_size
        check_no_window(shape)
        if page_size not in _PAGE_SIZES:
            raise ValueError(f"its kernels take pages of 16, 32, 64 or 128 tokens, not {page_size}; set --page-size 64")
        if shape.head_dim % _HEAD_STEP or shape.head_dim > _MOST_HEAD:
            raise ValueError(f"its head_dim must be a multiple of 16 up to 256, not {shape.head_dim}")

    def prefill(self, q_THE: Tensor, pages: Tensor, rows: PrefillRows, out_THE: Tensor, scales: PageScales) -> None:
        """FMHAv2; our kernel if there are too many float8 pages to upcast."""
        if self._fmha_v2.supports(rows):
            self._fmha_v2.attend(q_THE, pages, rows, out_THE, scales)
        else:
            self.prefill_by_triton(q_THE, pages, rows, out_THE, scales)

    def decode(self, q_DHE: Tensor, pages: Tensor, rows: DecodeRows, out_DHE: Tensor, scales: PageScales) -> None:
        """XQA."""
        trtllm_batch_decode_with_kv_cache(
            q_DHE,
            pages,
            self.xqa_workspace,
            rows.table_DW,
            rows.lengths_D,
            rows.table_DW.shape[1] * self.page_size,
            bmm1_scale=self.shape.scale * scales.k,
            bmm2_scale=scales.v,
            out=out_DHE,
            backend="xqa",
        )
