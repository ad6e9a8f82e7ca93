"""Backends of separate prefill and decode kernels, which read lengths and tables on the device: nothing is planned.

The two kernels run one after the other. On two streams attention takes 6% less of an H200's time, but whole servers are
no faster. One mixed kernel takes several times as long from 16 decode rows on
(tests/bench/results/gpu-mixed-attention.json).

Shapes: T tokens of the step, H query heads, G key-value heads, E elements of a head; P prefill and D decode rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from plait_kernels.attention import PagedPrefill, SplitKvSchedule, prefill_paged
from plait_kernels.kv_cache import PageScales, store
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements, CapturedPrefill, UnplannedPrefill
from plait_worker.attention.lengths import decode_lengths, device_lengths, slot_mapping
from plait_worker.attention.mha.upcast_kv import UpcastKv, upcast_kv
from plait_worker.attention.spec import MhaShape
from plait_worker.errors import ensure
from plait_worker.nvtx import nvtx_range
from plait_worker.rows import DeviceLengths, Rows


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decode rows of a step."""

    table_DW: Tensor
    """int32, contiguous."""
    lengths_D: Tensor
    """int32: KV lengths."""
    split_kv: SplitKvSchedule | None = None
    """Of the decode kernel, if it splits rows by KV length."""


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The prefill rows of a step."""

    lengths: DeviceLengths
    table_PW: Tensor
    """int32."""
    upcast: UpcastKv | None
    """Indices of an upcast copy of their float8 pages; None if the kernel reads the pages themselves."""


@dataclass(frozen=True, slots=True)
class SeparateKernelsStep:
    """``SlotMappedStep`` of one prefill and one decode call."""

    backend: SeparateKernels
    slot_mapping_T: Tensor
    num_prefill_tokens: int
    prefill: PrefillRows | None
    decode: DecodeRows

    def forward(self, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, pages: Tensor, scales: PageScales) -> Tensor:
        """See ``StepAttention``."""
        store(k_TGE, v_TGE, pages, self.slot_mapping_T, scales)
        return self.attend(q_THE, pages, scales)

    def attend(self, q_THE: Tensor, pages: Tensor, scales: PageScales) -> Tensor:
        """See ``SlotMappedStep``."""
        out_THE = self.backend.output_THE[: q_THE.shape[0]]
        num = self.num_prefill_tokens
        if self.prefill is not None:
            with nvtx_range("attention: prefill"):
                self.backend.prefill(q_THE[:num], pages, self.prefill, out_THE[:num], scales)
        if num < q_THE.shape[0]:
            with nvtx_range("attention: decode"):
                self.backend.decode(q_THE[num:], pages, self.decode, out_THE[num:], scales)
        return out_THE


class SeparateKernels(ABC):
    """``AttentionBackend`` whose steps with and without prefill rows can be captured."""

    name: str
    is_capturable = True
    captured_prefill: CapturedPrefill = UnplannedPrefill()
    upcasts_fp8: bool
    """Whether prefill rows read an upcast copy of float8 pages."""

    def __init__(self, requirements: BackendRequirements[MhaShape]) -> None:
        """Allocates the output of ``max_tokens`` tokens; raises ``ValueError`` with the rule that is broken."""
        self.validate(requirements)
        self.shape = shape = requirements.spec
        self.page_size = requirements.page_size
        size = (requirements.max_tokens, shape.num_heads, shape.head_dim)
        self.output_THE = torch.zeros(size, dtype=shape.dtype, device=requirements.device)
        """Shared by all layers.

        The kernels do not write the outputs of a captured step's padding tokens. These must be finite: the next layer
        writes what follows from them to the dummy page.
        """

    @staticmethod
    @abstractmethod
    def validate(requirements: BackendRequirements[MhaShape]) -> None:
        """Raises ``ValueError`` with the rule that is broken."""

    @abstractmethod
    def prefill(self, q_THE: Tensor, pages: Tensor, rows: PrefillRows, out_THE: Tensor, scales: PageScales) -> None:
        """Attention of the new tokens, written to ``out_THE``."""

    @abstractmethod
    def decode(self, q_DHE: Tensor, pages: Tensor, rows: DecodeRows, out_DHE: Tensor, scales: PageScales) -> None:
        """Attention of one query token a row, written to ``out_DHE``; at least one row."""

    def prefill_by_triton(
        self, q_THE: Tensor, pages: Tensor, rows: PrefillRows, out_THE: Tensor, scales: PageScales
    ) -> None:
        """``prefill`` by our Triton kernel, over pages of any type."""
        paged = PagedPrefill(rows.lengths.ends_q, rows.lengths.kv_P, rows.table_PW)
        prefill_paged(q_THE, pages, paged, self.shape.scale, out_THE, scales)

    def prepare(self, rows: Rows) -> SeparateKernelsStep:
        """Lengths and tables of prefill and decode rows."""
        ensure(
            rows.num_tokens <= self.output_THE.shape[0],
            f"a step of {rows.num_tokens} tokens exceeds the output buffer",
        )
        lengths = device_lengths(rows)
        upcast = upcast_kv(rows, self.page_size) if self.upcasts_fp8 else None
        table_PW = rows.page_table_RW[: rows.num_prefill]
        return SeparateKernelsStep(
            backend=self,
            slot_mapping_T=slot_mapping(rows, lengths, self.page_size),
            num_prefill_tokens=rows.num_prefill_tokens,
            prefill=None if lengths is None else PrefillRows(lengths, table_PW, upcast),
            decode=self.decode_rows(rows.page_table_RW[rows.num_prefill :], decode_lengths(rows)),
        )

    def decode_rows(self, table_DW: Tensor, lengths_D: Tensor) -> DecodeRows:
        """The argument of ``decode``; there may be no rows."""
        return DecodeRows(table_DW, lengths_D)
