"""Prefill rows by TensorRT-LLM's FMHAv2 for Hopper, as flashinfer packs it; what decodes beside it is the subclass's.

It reads lengths and page tables on the device and plans nothing on the host, so whole steps can be captured. It was not
built for pages of float8: it gets a copy of those in the queries' type, or our own Triton kernel stands in.

Shapes: T tokens of the step, H query heads and G key-value heads, E a head's width; P prefill and D decode rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from flashinfer.prefill import trtllm_fmha_v2_prefill
from plait_kernels.attention import PagedPrefill, prefill_paged
from plait_kernels.kv_cache import PageScales, store
from torch import Tensor

from plait_worker.attention import AttentionShape
from plait_worker.attention.lengths import decode_lengths, device_lengths, places
from plait_worker.attention.widened import Widened, widen
from plait_worker.failure import ensure
from plait_worker.ranges import named
from plait_worker.rows import DeviceLengths, Rows

# Its tile counter lies at the beginning; no other kernel may write there.
_WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decode rows of a step."""

    table_DW: Tensor
    """int32, contiguous."""
    lengths_D: Tensor
    """int32: positions that each row sees."""


@dataclass(frozen=True, slots=True)
class SplitStep:
    """``StepAttention`` of two calls, one for each sort of rows."""

    backend: FmhaV2
    place_T: Tensor
    num_prefill_tokens: int
    prefill: DeviceLengths | None
    table_PW: Tensor
    decode: DecodeRows
    widened: Widened | None

    def forward(self, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, pages: Tensor) -> Tensor:
        """Write the step's keys and values into the layer's pages, then attend: ``out_THE``."""
        store(k_TGE, v_TGE, pages, self.place_T, self.scales)
        return self.attend(q_THE, pages)

    @property
    def scales(self) -> PageScales:
        """Of what is written."""
        return self.backend.shape.scales

    def attend(self, q_THE: Tensor, pages: Tensor) -> Tensor:
        """Attend over pages that hold the step's keys and values: ``out_THE``."""
        out_THE = self.backend.output_THE[: q_THE.shape[0]]
        num = self.num_prefill_tokens
        if self.prefill is not None:
            with named("attention: prefill"):
                self._prefill(self.prefill, q_THE[:num], pages, out_THE[:num])
        if num < q_THE.shape[0]:
            with named("attention: decode"):
                self.backend.decode(q_THE[num:], pages, self.decode, out_THE[num:])
        return out_THE

    def _prefill(self, lengths: DeviceLengths, q_THE: Tensor, pages: Tensor, out_THE: Tensor) -> None:
        shape, table_PW = self.backend.shape, self.table_PW
        if self.widened is not None:
            pages, table_PW = self.widened.gather(pages, q_THE.dtype), self.widened.table_PW
        elif shape.fp8 is not None:
            rows = PagedPrefill(lengths.ends_q, lengths.kv_P, table_PW)
            prefill_paged(q_THE, pages, rows, shape.scale, out_THE, shape.fp8)
            return
        trtllm_fmha_v2_prefill(
            (q_THE, pages),
            "Q_PAGED_KV_HND",
            self.backend.workspace,
            lengths.kv_P,
            lengths.max_q,
            lengths.max_kv,
            shape.scale * shape.scales.k,
            1.0,
            table_PW.shape[0],
            lengths.ends_q,
            lengths.ends_kv,
            block_tables=table_PW,
            out=out_THE,
        )
        if shape.scales.v != 1:  # the kernel reads a factor of the values and leaves it out (seen on an H200)
            out_THE *= shape.scales.v


class FmhaV2(ABC):
    """``AttentionBackend`` for compute capability 9.0, but for its decode rows."""

    name: str
    is_capturable = True
    captures_prompts = True

    def __init__(self, shape: AttentionShape, page_size: int, max_tokens: int, device: torch.device) -> None:
        """``page_size`` in tokens; allocates the workspace and the output of ``max_tokens`` tokens."""
        self.shape = shape
        self.page_size = page_size
        self.workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.output_THE = torch.zeros(max_tokens, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=device)
        """Of every layer in turn.

        Tokens that fill a captured step up belong to no row, so the kernels leave their output as it was. It must
        be finite, for it goes on into the next layer's dummy page.
        """

    @abstractmethod
    def decode(self, q_DHE: Tensor, pages: Tensor, rows: DecodeRows, out_DHE: Tensor) -> None:
        """Attend with one query token a row, at least one row; ``out_DHE`` is written."""

    def prepare(self, rows: Rows) -> SplitStep:
        """Lengths and tables of both sorts of rows."""
        ensure(rows.num_tokens <= self.output_THE.shape[0], f"a step of {rows.num_tokens} tokens has no room")
        lengths = device_lengths(rows)
        return SplitStep(
            backend=self,
            place_T=places(rows, lengths, self.page_size),
            num_prefill_tokens=rows.num_prefill_tokens,
            prefill=lengths,
            table_PW=rows.page_table_RW[: rows.num_prefill],
            decode=DecodeRows(rows.page_table_RW[rows.num_prefill :], decode_lengths(rows)),
            widened=widen(rows, self.page_size) if self.shape.fp8 is not None else None,
        )
