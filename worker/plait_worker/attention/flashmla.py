"""FlashMLA's dense kernel (wheel sgl-flash-mla): lengths and tables are read on the device, nothing is planned there.

One query token a row: the tokens of a short append are rows of their own, each with its request's table.

Shapes: A absorbed tokens, W pages in the widest table, H heads, C cached of a token, L of it the latent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from flash_mla import flash_mla_with_kvcache, get_mla_metadata
from torch import Tensor

from plait_worker.attention import LatentShape
from plait_worker.attention.latent_kernels import LatentKernels
from plait_worker.rows import DeviceLengths, Rows

_PAGE_SIZE = 64

Schedule = object
"""FlashMLA's division of the work among the multiprocessors; its first call of a step fills it, on the device."""


@dataclass(frozen=True, slots=True)
class FlashMlaRows:
    """The absorbed tokens of a step."""

    table_AW: Tensor
    """int32, contiguous."""
    lengths_A: Tensor
    """int32: positions that each token sees."""
    schedule: Schedule


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

    def plan(self, rows: Rows, lengths: DeviceLengths | None, *, is_whole: bool) -> FlashMlaRows:
        """Table and length of each absorbed token."""
        first = 0 if is_whole else rows.num_prefill_tokens
        lengths_A = (rows.positions_T[first:] + 1).to(torch.int32)
        table_AW = rows.page_table_RW[0 if is_whole else rows.num_prefill :]
        if is_whole and lengths is not None:
            table_AW = table_AW.index_select(0, lengths.row_T)
        return FlashMlaRows(table_AW, lengths_A, get_mla_metadata()[0])

    def attend(self, q_AHC: Tensor, pages: Tensor, planned: FlashMlaRows) -> Tensor:
        """See ``LatentKernels``."""
        out_A1HL, _ = flash_mla_with_kvcache(
            q_AHC[:, None],
            pages[:, :, None],
            planned.table_AW,
            planned.lengths_A,
            self.shape.latent_dim,
            planned.schedule,
            softmax_scale=self.shape.scale,
            causal=False,
            use_legacy=True,
        )
        out_AHL: Tensor = out_A1HL[:, 0]
        return out_AHL
