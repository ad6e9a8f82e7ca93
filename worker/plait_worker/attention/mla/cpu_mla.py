"""MLA by the compiled CPU kernels: absorbed rows read the pages in place, others are decompressed by kv_b_proj.

Shapes as in ``plait_worker.attention.backend``; N decompressed prefill rows, I cached tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from plait_kernels.attention import merge_into
from plait_kernels.attention.cpu import HeadSizes
from plait_kernels.mla.cpu import AbsorbedRows, DecompressedRows, PagedMla, can_attend_mla
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements, KvBProj
from plait_worker.attention.mla.cached_context import ContextChunk, context_chunks
from plait_worker.attention.mla.short_extend import short_extends_last
from plait_worker.attention.spec import MlaShape
from plait_worker.attention.torch_batches import pages_of_tokens
from plait_worker.rows import Rows


@dataclass(frozen=True, slots=True)
class _Context:
    """A chunk of cached tokens, and the prefill rows that see it."""

    tokens: slice
    """The rows' new tokens."""
    rows: DecompressedRows
    index_I: Tensor
    """int64: indices of the cached tokens in the flat cache ``[pages * page_size, C]``."""


@dataclass(frozen=True, slots=True)
class CpuMlaStep:
    """``MlaStep`` of the compiled kernels."""

    num_prefill_tokens: int
    slot_mapping_T: Tensor
    """See ``MlaStep``."""
    order_T: Tensor | None
    cached_scale: float
    new: DecompressedRows
    """The decompressed prefill rows over their new tokens."""
    contexts: list[_Context]
    absorbed: AbsorbedRows

    @property
    def decode_waits(self) -> bool:
        """See ``MlaStep``."""
        return False

    def prefill(self, q_PHE: Tensor, latent_PC: Tensor, pages: Tensor, kv_b_proj: KvBProj, out_PHV: Tensor) -> None:
        """See ``MlaStep``."""
        new_PHV, lse_PH = self.new.attend(q_PHE, *kv_b_proj(latent_PC))
        merged_PHV, cached = new_PHV.float() if self.contexts else new_PHV, pages.view(-1, pages.shape[-1])
        for context in self.contexts:
            own = context.tokens
            part = context.rows.attend(q_PHE[own], *kv_b_proj(cached.index_select(0, context.index_I)))
            merge_into(merged_PHV[own], lse_PH[own], *part)
        out_PHV.copy_(merged_PHV)

    def decode(self, q_BHC: Tensor, pages: Tensor) -> Tensor:
        """See ``MlaStep``."""
        return self.absorbed.attend(q_BHC, pages)


class CpuMla:
    """``AttentionBackend`` of ``MlaStep`` for CPUs, in bfloat16 and float32."""

    name = "cpu"
    is_capturable = False
    captured_prefill = None

    def __init__(self, requirements: BackendRequirements[MlaShape]) -> None:
        shape, page_size = requirements.spec, requirements.page_size
        self.mla_context_chunk_size = requirements.mla_context_chunk_size
        self.paged = PagedMla(shape.num_heads, shape.latent_dim, shape.cached_dim, shape.scale, page_size)
        self.sizes = HeadSizes(shape.num_heads, shape.num_heads, shape.query_dim, shape.value_dim, shape.scale)

    @staticmethod
    def supports(shape: MlaShape) -> bool:
        """Whether the kernels are built and support the shape."""
        return can_attend_mla(shape.query_dim, shape.cached_dim, torch.empty(0, dtype=shape.cached_dtype))

    def prepare(self, rows: Rows) -> CpuMlaStep:
        """The rows in the kernels' form."""
        ordered = short_extends_last(rows, self._is_short)
        rows, first = ordered.rows, ordered.num_decompressed
        page_size = self.paged.page_size
        return CpuMlaStep(
            num_prefill_tokens=ordered.num_decompressed_tokens,
            slot_mapping_T=pages_of_tokens(rows, page_size) * page_size + rows.positions_T % page_size,
            order_T=ordered.order_T,
            cached_scale=1.0,
            new=DecompressedRows(self.sizes, rows.lengths[:first], rows.lengths[:first], is_causal=True),
            contexts=[self._context(rows, chunk) for chunk in self._chunks(rows, first)],
            absorbed=AbsorbedRows(
                self.paged, rows.starts[first:], rows.lengths[first:], rows.page_table_RW[first:].contiguous()
            ),
        )

    def _is_short(self, start: int, length: int) -> bool:
        """Whether a row needs fewer multiplications absorbed.

        Absorbed, each pair of a new token and one that it sees costs more. Decompressed, each cached token is
        up-projected; for the new tokens both ways cost the same.
        """
        paged, sizes = self.paged, self.sizes
        num_pairs = length * start + length * (length + 1) // 2
        more = paged.cached_dim + paged.latent_dim - sizes.key_dim - sizes.value_dim
        rope_dim = paged.cached_dim - paged.latent_dim
        return num_pairs * more <= start * paged.latent_dim * (sizes.key_dim - rope_dim + sizes.value_dim)

    def _chunks(self, rows: Rows, num_rows: int) -> Iterator[ContextChunk]:
        return context_chunks(rows.starts[:num_rows], self.mla_context_chunk_size)

    def _context(self, rows: Rows, chunk: ContextChunk) -> _Context:
        lengths = rows.lengths[chunk.rows]
        begin = sum(rows.lengths[: chunk.first])
        return _Context(
            tokens=slice(begin, begin + sum(lengths)),
            rows=DecompressedRows(self.sizes, lengths, chunk.lengths.tolist(), is_causal=False),
            index_I=chunk.slot_mapping(rows.page_table_RW, self.paged.page_size),
        )
