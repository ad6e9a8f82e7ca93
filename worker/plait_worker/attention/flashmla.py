"""FlashMLA's dense kernel (wheel sgl-flash-mla): lengths and tables are read on the device, nothing is planned there.

One query token a row: the tokens of a short append are rows of their own, each with its request's table. Over pages
of float8 the kernel wants queries in it too, and rounds the softmax's weights to it. One row or two of few
heads, for which it takes up to twice as long as they need, go through our own kernel.

Shapes: A absorbed tokens, W pages in the widest table, H heads, C cached of a token, L of it the latent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from flash_mla import flash_mla_with_kvcache, get_mla_decoding_metadata, get_mla_metadata
from plait_kernels.kv_cache import FP8, stored
from plait_kernels.latent import decode_few
from torch import Tensor

from plait_worker.attention import LatentShape
from plait_worker.attention.latent_kernels import LatentKernels
from plait_worker.rows import DeviceLengths, Rows

_PAGE_SIZE = 64
_FEW_ROWS, _FEW_HEADS = 2, 16


@dataclass(slots=True)
class Schedule:
    """FlashMLA's division of the work among the multiprocessors, made on the device beside the step's first kernels."""

    made: Any
    is_ready: torch.cuda.Event | None
    """None where the step's own stream has waited for it."""

    def taken(self) -> Any:
        """The schedule, once it is there."""
        if self.is_ready is not None:
            torch.cuda.current_stream().wait_event(self.is_ready)
            self.is_ready = None
        return self.made


@dataclass(frozen=True, slots=True)
class FlashMlaRows:
    """The absorbed tokens of a step."""

    table_AW: Tensor
    """int32, contiguous."""
    lengths_A: Tensor
    """int32: positions that each token sees."""
    schedule: Schedule | None
    """None where the rows are few."""


class FlashMla(LatentKernels[FlashMlaRows]):
    """``AttentionBackend`` for compute capability 9.0."""

    name = "flashmla"
    is_capturable = True
    captures_prompts = True

    def __init__(
        self, shape: LatentShape, page_size: int, context_chunk: int, max_tokens: int, device: torch.device
    ) -> None:
        """See ``LatentKernels``."""
        if page_size != _PAGE_SIZE:
            raise ValueError(f"it takes pages of {_PAGE_SIZE} tokens, not {page_size}; add --page-size {_PAGE_SIZE}")
        super().__init__(shape, page_size, context_chunk, max_tokens, device)
        self._beside = torch.cuda.Stream(device)
        self._is_fp8 = shape.cached_dtype == FP8
        scales = torch.tensor([1.0, shape.cached_scale], device=device)
        self._float8 = (
            {"is_fp8_kvcache": True, "descale_q": scales[:1], "descale_k": scales[1:]} if self._is_fp8 else {}
        )

    def plan(self, rows: Rows, lengths: DeviceLengths | None, first: int) -> FlashMlaRows:
        """Table and length of each absorbed token."""
        first_token = sum(rows.lengths[:first])
        lengths_A = (rows.positions_T[first_token:] + 1).to(torch.int32)
        if lengths is None or first == rows.num_prefill:
            table_AW = rows.page_table_RW[first:]
        else:
            table_AW = rows.page_table_RW.index_select(0, lengths.row_T[first_token:])
        is_few = len(lengths_A) <= _FEW_ROWS and self.shape.num_heads <= _FEW_HEADS
        return FlashMlaRows(table_AW, lengths_A, None if is_few else self._schedule(lengths_A))

    def _schedule(self, lengths_A: Tensor) -> Schedule:
        """One block of threads makes it, in 20 to 40 us: nothing waits for that before the first attention."""
        made = get_mla_metadata()[0]
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            made.tile_scheduler_metadata, made.num_splits = get_mla_decoding_metadata(
                lengths_A, self.shape.num_heads, 1, is_fp8_kvcache=self._is_fp8, use_legacy=True
            )
            return Schedule(made, self._beside.record_event())

    def attend(self, q_AHC: Tensor, pages: Tensor, planned: FlashMlaRows) -> Tensor:
        """See ``LatentKernels``."""
        shape = self.shape
        if planned.schedule is None:
            rows = (planned.table_AW, planned.lengths_A)
            return decode_few(q_AHC, pages, *rows, shape.latent_dim, shape.scale, shape.cached_scale)
        out_A1HL, _ = flash_mla_with_kvcache(
            stored(q_AHC, shape.cached_dtype, 1.0)[:, None],
            pages[:, :, None],
            planned.table_AW,
            planned.lengths_A,
            shape.latent_dim,
            planned.schedule.taken(),
            softmax_scale=shape.scale,
            causal=False,
            use_legacy=True,
            **self._float8,
        )
        out_AHL: Tensor = out_A1HL[:, 0]
        return out_AHL
