"""flashinfer's own kernels: fa3 over pages for prefill rows, fa2 on tensor cores for decode rows.

Both plan on the host from host lengths, into pinned memory that is copied later. A ring of wrappers keeps a plan from
overwriting an earlier one before its copy.

The prefill kernel also takes a few decode rows of small KV length: that saves a plan and a launch.

Shapes: T tokens of the step, H query heads, G key-value heads, E elements of a head; R rows, I pages of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from plait_kernels.kv_cache import PageScales, store
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.lengths import device_lengths, indptr, page_indices, slot_mapping
from plait_worker.attention.mha.mixed_kernel import prefers_mixed_kernel
from plait_worker.attention.plan_ring import PlanRing
from plait_worker.attention.spec import MhaShape, check_no_window
from plait_worker.nvtx import nvtx_range
from plait_worker.rows import Rows

_WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class _PageLists:
    """Page table of some rows in CSR form."""

    indptr: Tensor
    """int32 ``[R + 1]`` on the host."""
    pages_I: Tensor
    """int32, on the device."""
    last_length_R: Tensor
    """int32 on the host: tokens in each row's last page."""


@dataclass(frozen=True, slots=True)
class FlashinferMhaStep:
    """``StepAttention`` of this backend."""

    slot_mapping_T: Tensor
    num_prefill_tokens: int
    prefill: BatchPrefillWithPagedKVCacheWrapper | None
    decode: BatchDecodeWithPagedKVCacheWrapper | None

    def forward(self, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, pages: Tensor, scales: PageScales) -> Tensor:
        """See ``StepAttention``; its pages are not scaled."""
        store(k_TGE, v_TGE, pages, self.slot_mapping_T)
        return self.attend(q_THE, pages, scales)

    def attend(self, q_THE: Tensor, pages: Tensor, _scales: PageScales) -> Tensor:
        """See ``SlotMappedStep``."""
        out_THE = torch.empty_like(q_THE)
        num = self.num_prefill_tokens
        if self.prefill is not None:
            with nvtx_range("attention: prefill"):
                self.prefill.run(q_THE[:num], pages, out=out_THE[:num])
        if self.decode is not None:
            with nvtx_range("attention: decode"):
                self.decode.run(q_THE[num:], pages, out=out_THE[num:])
        return out_THE


class FlashinferMha:
    """``AttentionBackend`` for compute capability 9.0."""

    name = "flashinfer"
    is_capturable = False
    captured_prefill = None

    def __init__(self, requirements: BackendRequirements[MhaShape]) -> None:
        """Allocates the wrappers; raises ``ValueError`` with the rule that is broken."""
        self.validate(requirements)
        self.shape, self.page_size = requirements.spec, requirements.page_size
        device = requirements.device
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prefill = PlanRing(lambda: BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa3"), device)
        self._decode = PlanRing(
            lambda: BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True), device
        )

    @staticmethod
    def validate(requirements: BackendRequirements[MhaShape]) -> None:
        """Raises ``ValueError`` with the rule that is broken."""
        check_no_window(requirements.spec)
        if requirements.spec.is_fp8:
            raise ValueError(
                "its kernels for float8 pages are not built; use triton or trtllm_mha for --kv-cache-dtype fp8"
            )

    def prepare(self, rows: Rows) -> FlashinferMhaStep:
        """Plan both kernels from the host's lengths, or one mixed kernel for all rows."""
        if prefers_mixed_kernel(self.name, self.shape, rows):
            rows = replace(rows, num_prefill=rows.num_rows)
        split = rows.num_prefill
        return FlashinferMhaStep(
            slot_mapping_T=slot_mapping(rows, device_lengths(rows), self.page_size),
            num_prefill_tokens=rows.num_prefill_tokens,
            prefill=self._plan_prefill(rows, slice(0, split)) if split else None,
            decode=self._plan_decode(rows, slice(split, rows.num_rows)) if split < rows.num_rows else None,
        )

    def _plan_prefill(self, rows: Rows, part: slice) -> BatchPrefillWithPagedKVCacheWrapper:
        lists = self._page_lists(rows, part)
        with self._prefill.take() as wrapper:
            wrapper.plan(
                indptr(np.array(rows.lengths[part])),
                lists.indptr,
                lists.pages_I,
                lists.last_length_R,
                self.shape.num_heads,
                self.shape.num_kv_heads,
                self.shape.head_dim,
                self.page_size,
                causal=True,
                sm_scale=self.shape.scale,
                q_data_type=self.shape.dtype,
            )
        return wrapper

    def _plan_decode(self, rows: Rows, part: slice) -> BatchDecodeWithPagedKVCacheWrapper:
        lists = self._page_lists(rows, part)
        with self._decode.take() as wrapper:
            wrapper.plan(
                lists.indptr,
                lists.pages_I,
                lists.last_length_R,
                self.shape.num_heads,
                self.shape.num_kv_heads,
                self.shape.head_dim,
                self.page_size,
                sm_scale=self.shape.scale,
                q_data_type=self.shape.dtype,
            )
        return wrapper

    def _page_lists(self, rows: Rows, part: slice) -> _PageLists:
        seen_R = np.array(rows.starts[part]) + np.array(rows.lengths[part])
        num_R = -(-seen_R // self.page_size)
        last_length_R = torch.from_numpy((seen_R - (num_R - 1) * self.page_size).astype(np.int32))
        return _PageLists(indptr(num_R), page_indices(rows.page_table_RW[part], num_R), last_length_R)
