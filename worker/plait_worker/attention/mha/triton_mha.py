"""Our Triton kernel for decode rows; for prefill rows TensorRT-LLM's FMHAv2, or ours if that is not built.

Shapes: T tokens of the prefill rows, D decode rows, H query heads, E elements of a head.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from plait_kernels.attention import decode_paged, schedule_split_kv
from plait_kernels.kv_cache import PageScales
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.jit.modules import has_fmha_v2
from plait_worker.attention.mha.separate_kernels import DecodeRows, PrefillRows, SeparateKernels
from plait_worker.attention.spec import MhaShape, check_no_window

if TYPE_CHECKING:
    from plait_worker.attention.mha.fmha_v2 import FmhaV2

_log = logging.getLogger(__name__)

_LEAST_TILE = 16


class TritonMha(SeparateKernels):
    """``AttentionBackend`` for compute capability 9.0."""

    name = "triton"

    def __init__(self, requirements: BackendRequirements[MhaShape]) -> None:
        super().__init__(requirements)
        self._fmha_v2 = _fmha_v2(self.shape, requirements.device)
        self.upcasts_fp8 = self.shape.is_fp8 and self._fmha_v2 is not None

    @staticmethod
    def validate(requirements: BackendRequirements[MhaShape]) -> None:
        """See ``SeparateKernels``."""
        shape, page_size = requirements.spec, requirements.page_size
        check_no_window(shape)
        if not _is_tile(shape.head_dim):
            raise ValueError(f"its head_dim must be a power of two from 16 on, not {shape.head_dim}")
        if not _is_tile(page_size):
            raise ValueError(f"its page size must be a power of two from 16 on, not {page_size}; set --page-size 64")

    def prefill(self, q_THE: Tensor, pages: Tensor, rows: PrefillRows, out_THE: Tensor, scales: PageScales) -> None:
        """FMHAv2 if it is built and reads such pages."""
        if self._fmha_v2 is not None and self._fmha_v2.supports(rows):
            self._fmha_v2.attend(q_THE, pages, rows, out_THE, scales)
        else:
            self.prefill_by_triton(q_THE, pages, rows, out_THE, scales)

    def decode(self, q_DHE: Tensor, pages: Tensor, rows: DecodeRows, out_DHE: Tensor, scales: PageScales) -> None:
        """Our kernel."""
        decode_paged(q_DHE, pages, rows.table_DW, rows.lengths_D, self.shape.scale, out_DHE, scales, rows.split_kv)

    def decode_rows(self, table_DW: Tensor, lengths_D: Tensor) -> DecodeRows:
        """With a split-KV schedule if the batch is large enough."""
        shape = self.shape
        split_kv = schedule_split_kv(lengths_D, self.page_size, shape.num_heads, shape.num_kv_heads, shape.head_dim)
        return DecodeRows(table_DW, lengths_D, split_kv)


def _is_tile(size: int) -> bool:
    """Whether the tensor cores take it as a tile."""
    return size >= _LEAST_TILE and size.bit_count() == 1


def _fmha_v2(shape: MhaShape, device: torch.device) -> FmhaV2 | None:
    if not has_fmha_v2(shape):
        _log.warning(
            "attention backend triton: FMHAv2 is not built, prefill uses our slower kernel; run `plait kernels build`"
        )
        return None
    from plait_worker.attention.mha.fmha_v2 import FmhaV2

    return FmhaV2(shape, device)
