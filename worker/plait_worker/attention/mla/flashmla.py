"""FlashMLA's dense kernel (wheel sgl-flash-mla): it reads lengths and tables on the device; nothing is planned.

Over float8 pages the kernel takes float8 queries and rounds the softmax's weights to float8.

The bfloat16 kernel is launched with PDL but never waits for the preceding kernel's writes (its SASS has no ACQBULK).
It takes its loop bounds from the schedule. If the schedule were made directly before it, as the library does by
default, a block could read old bounds and loop without end.

Shapes: A absorbed tokens, W pages in the widest table, H heads, C elements cached of a token, L of them the latent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from flash_mla import flash_mla_with_kvcache, get_mla_decoding_metadata, get_mla_metadata
from plait_kernels.kv_cache import FP8, to_cache_dtype
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.mla.hopper_mla import AbsorbedTokens, HopperMla, absorbed_tokens
from plait_worker.attention.spec import MlaShape
from plait_worker.rows import DeviceLengths, Rows

_PAGE_SIZE = 64

Schedule = object
"""FlashMLA's split of the work over multiprocessors, made on the device."""


@dataclass(frozen=True, slots=True)
class FlashMlaRows:
    """The absorbed tokens of a step."""

    tokens: AbsorbedTokens
    schedule: Schedule


class FlashMla(HopperMla[FlashMlaRows]):
    """``AttentionBackend`` for compute capability 9.0."""

    name = "flashmla"
    is_capturable = True

    def __init__(self, requirements: BackendRequirements[MlaShape]) -> None:
        super().__init__(requirements)
        self._is_fp8 = self.shape.cached_dtype == FP8
        scales = torch.tensor([1.0, self.shape.cached_scale], device=requirements.device)
        self._float8 = (
            {"is_fp8_kvcache": True, "descale_q": scales[:1], "descale_k": scales[1:]} if self._is_fp8 else {}
        )

    @staticmethod
    def validate(requirements: BackendRequirements[MlaShape]) -> None:
        """See ``HopperMla``."""
        page_size = requirements.page_size
        if page_size != _PAGE_SIZE:
            raise ValueError(f"it takes pages of {_PAGE_SIZE} tokens, not {page_size}; set --page-size {_PAGE_SIZE}")
        HopperMla.validate(requirements)

    def plan(self, rows: Rows, lengths: DeviceLengths | None, first: int) -> FlashMlaRows:
        """Table and KV length of each absorbed token."""
        tokens = absorbed_tokens(rows, lengths, first)
        return FlashMlaRows(tokens, self._schedule(tokens.lengths_A))

    def _schedule(self, lengths_A: Tensor) -> Schedule:
        """Made before the step's first layer: other kernels must run between it and attention."""
        schedule = get_mla_metadata()[0]
        schedule.tile_scheduler_metadata, schedule.num_splits = get_mla_decoding_metadata(
            lengths_A, self.shape.num_heads, 1, is_fp8_kvcache=self._is_fp8, use_legacy=True
        )
        return schedule

    def attend(self, q_AHC: Tensor, pages: Tensor, planned: FlashMlaRows) -> Tensor:
        """See ``HopperMla``."""
        out_A1HL, _ = flash_mla_with_kvcache(
            to_cache_dtype(q_AHC, self.shape.cached_dtype, 1.0)[:, None],
            pages[:, :, None],
            planned.tokens.table_AW,
            planned.tokens.lengths_A,
            self.shape.latent_dim,
            planned.schedule,
            softmax_scale=self.shape.scale,
            causal=False,
            use_legacy=True,
            **self._float8,
        )
        out_AHL: Tensor = out_A1HL[:, 0]
        return out_AHL
