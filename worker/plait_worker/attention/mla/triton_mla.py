"""Our Triton kernel for absorbed rows of MLA: split-KV by lengths on the device, so nothing is planned on the host.

Shapes: A absorbed tokens, H heads, C elements cached of a token, L of them the latent.
"""

from __future__ import annotations

from plait_kernels.kv_cache import FP8
from plait_kernels.mla import AbsorbedRows, decode_absorbed, schedule_absorbed
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.mla.hopper_mla import HopperMla, absorbed_tokens
from plait_worker.attention.spec import MlaShape
from plait_worker.rows import DeviceLengths, Rows

_LEAST_PAGE = 16
"""Rows of the smallest tile for tensor cores; a tile of tokens is in one page."""


class TritonMla(HopperMla[AbsorbedRows]):
    """``AttentionBackend`` for compute capability 9.0."""

    name = "triton_mla"
    is_capturable = True
    decode_waits = True

    @staticmethod
    def validate(requirements: BackendRequirements[MlaShape]) -> None:
        """See ``HopperMla``."""
        page_size = requirements.page_size
        if page_size < _LEAST_PAGE or page_size.bit_count() != 1:
            raise ValueError(f"its page size must be a power of two from 16 on, not {page_size}; set --page-size 64")
        if requirements.spec.cached_dtype == FP8:
            raise ValueError(
                "its kernel reads no float8 pages; use flashmla or flashinfer_mla for --kv-cache-dtype fp8"
            )
        HopperMla.validate(requirements)

    def plan(self, rows: Rows, lengths: DeviceLengths | None, first: int) -> AbsorbedRows:
        """Each absorbed token as a row, and their schedule, made on the device."""
        table_AW, lengths_A = absorbed_tokens(rows, lengths, first)
        shape = self.shape
        schedule = schedule_absorbed(lengths_A, shape.dtype, self.page_size, shape.num_heads, shape.latent_dim)
        return AbsorbedRows(table_AW, lengths_A, schedule)

    def attend(self, q_AHC: Tensor, pages: Tensor, planned: AbsorbedRows) -> Tensor:
        """See ``HopperMla``."""
        out_AHL = q_AHC.new_empty(*q_AHC.shape[:2], self.shape.latent_dim)
        decode_absorbed(q_AHC, pages, planned, self.shape.scale, out_AHL)
        return out_AHL
