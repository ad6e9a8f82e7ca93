"""MHA by TensorRT-LLM's Blackwell kernels (trtllm-gen), as flashinfer packs them.

Both kernels read lengths and tables on the device. They were not run on our hardware: the tests check the calls against
a stand-in with the same contract (tests/plait_testing/trtllm_gen).

Shapes: T tokens of the step, P those of its prefill rows, A the others, H query heads and G key-value heads, D numbers
in a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from flashinfer.prefill import trtllm_batch_context_with_kv_cache
from plait_kernels.kv_cache import PageScales, store
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.device_metadata import DeviceMetadata, Ragged, build_device_metadata
from plait_worker.attention.lengths import device_lengths, token_slot_mapping
from plait_worker.attention.spec import MhaShape, check_no_window
from plait_worker.attention.trtllm_workspace import Scratch
from plait_worker.rows import DeviceLengths, Rows

PAGE_SIZES = (16, 32, 64)
HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class TrtllmGenMhaStep:
    """``SlotMappedStep`` of one prefill and one decode call."""

    backend: TrtllmGenMha
    slot_mapping_T: Tensor
    num_prefill_tokens: int
    prefill: DeviceLengths | None
    table_PW: Tensor
    decode: DeviceMetadata | None

    def forward(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pages: Tensor, scales: PageScales) -> Tensor:
        """See ``StepAttention``; its pages are not scaled."""
        store(k_TGD, v_TGD, pages, self.slot_mapping_T)
        return self.attend(q_THD, pages, scales)

    def attend(self, q_THD: Tensor, pages: Tensor, _scales: PageScales) -> Tensor:
        """See ``SlotMappedStep``."""
        out_THD = torch.empty_like(q_THD)
        num = self.num_prefill_tokens
        if self.prefill is not None:
            self.backend.context(self.prefill, self.table_PW, q_THD[:num], pages, out_THD[:num])
        if self.decode is not None:
            self.backend.decode(self.decode, q_THD[num:], pages, out_THD[num:])
        return out_THD


class TrtllmGenMha:
    """``AttentionBackend`` for compute capabilities 10.0 and 10.3."""

    name = "trtllm_mha"
    is_capturable = True
    # Captured steps contain prefill rows without tokens. Whether these kernels take them is unknown.
    captured_prefill = None

    def __init__(self, requirements: BackendRequirements[MhaShape]) -> None:
        """Raises ``ValueError`` with the rule that is broken."""
        self.validate(requirements)
        self.shape = shape = requirements.spec
        self.page_size = requirements.page_size
        self.scratch = Scratch.of(shape.num_heads, shape.head_dim, requirements.max_tokens, requirements.device)

    def prepare(self, rows: Rows) -> TrtllmGenMhaStep:
        """Lengths and tables of prefill and decode rows."""
        return TrtllmGenMhaStep(
            backend=self,
            slot_mapping_T=token_slot_mapping(rows, self.page_size),
            num_prefill_tokens=rows.num_prefill_tokens,
            prefill=device_lengths(rows),
            table_PW=rows.page_table_RW[: rows.num_prefill],
            decode=build_device_metadata(rows, range(rows.num_prefill, rows.num_rows), rows.num_prefill_tokens),
        )

    def context(self, lengths: DeviceLengths, table_PW: Tensor, q_PHD: Tensor, pages: Tensor, out_PHD: Tensor) -> None:
        """Attention of prefill rows over their whole context, written to ``out_PHD``."""
        trtllm_batch_context_with_kv_cache(
            q_PHD,
            pages,
            self.scratch.workspace,
            table_PW,
            lengths.kv_P,
            lengths.max_q,
            lengths.max_kv,
            self.shape.scale,
            1.0,
            table_PW.shape[0],
            lengths.ends_q,
            lengths.ends_kv,
            out=out_PHD,
            multi_ctas_kv_counter_buffer=self.scratch.counters,
        )

    def decode(self, rows: DeviceMetadata, q_AHD: Tensor, pages: Tensor, out_AHD: Tensor) -> None:
        """Attention of rows of one or a few query tokens, written to ``out_AHD``."""
        queries = rows.queries
        trtllm_batch_decode_with_kv_cache(
            q_AHD,
            pages,
            self.scratch.workspace,
            rows.table_BW,
            rows.lengths_B,
            rows.table_BW.shape[1] * self.page_size,
            bmm1_scale=self.shape.scale,
            bmm2_scale=1.0,
            out=out_AHD,
            backend="trtllm-gen",
            q_len_per_req=queries if isinstance(queries, int) else None,
            max_q_len=queries.max_queries if isinstance(queries, Ragged) else None,
            cum_seq_lens_q=queries.ends if isinstance(queries, Ragged) else None,
            multi_ctas_kv_counter_buffer=self.scratch.counters,
        )

    @staticmethod
    def validate(requirements: BackendRequirements[MhaShape]) -> None:
        """Raises ``ValueError`` with the rule that is broken."""
        shape, page_size = requirements.spec, requirements.page_size
        check_no_window(shape)
        if shape.is_fp8:
            raise ValueError("it does not support float8 pages yet; leave out --kv-cache-dtype fp8")
        if page_size not in PAGE_SIZES:
            raise ValueError(f"its kernels take pages of 16, 32 or 64 tokens, not {page_size}; set --page-size 64")
        if shape.head_dim not in HEAD_DIMS:
            raise ValueError(f"its kernels take a head_dim of 64, 128 or 256, not {shape.head_dim}")
