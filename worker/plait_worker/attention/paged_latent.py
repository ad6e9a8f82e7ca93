"""Latent attention by the compiled CPU kernels: over the pages where queries are absorbed, over keys and values of
every head where they are not.

Shapes as in ``plait_worker.attention``; N prefill rows that are not absorbed, I cached tokens of one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from plait_kernels.attention import merge_into
from plait_kernels.attention.rows import HeadSizes
from plait_kernels.latent.native import ExpandedRows, LatentRows, PagedLatents, can_attend_latents
from torch import Tensor

from plait_worker.attention import Expand, LatentShape
from plait_worker.attention.batches import pages_of_tokens
from plait_worker.attention.context_pieces import ContextPiece, context_pieces
from plait_worker.attention.row_order import short_last
from plait_worker.rows import Rows


@dataclass(frozen=True, slots=True)
class _Context:
    """Some of the cached tokens of neighbouring prefill rows."""

    tokens: slice
    """The rows' new tokens."""
    rows: ExpandedRows
    index_I: Tensor
    """Where in the flat cache ``[pages * page size, C]`` the cached tokens lie, int64."""


@dataclass(frozen=True, slots=True)
class PagedLatentStep:
    """``LatentStep`` of the compiled kernels."""

    num_prefill_tokens: int
    slot_mapping_T: Tensor
    """Where in the flat cache the step's tokens go."""
    order_T: Tensor | None
    cached_scale: float
    new: ExpandedRows
    """The prefill rows that are not absorbed, over their new tokens."""
    contexts: list[_Context]
    absorbed: LatentRows

    def prefill(self, q_PHE: Tensor, latent_PC: Tensor, pages: Tensor, expand: Expand, out_PHV: Tensor) -> None:
        """The prefill rows' tokens attend to themselves and, piece by piece, to what is cached."""
        new_PHV, lse_PH = self.new.attend(q_PHE, *expand(latent_PC))
        joined_PHV, cached = new_PHV.float() if self.contexts else new_PHV, pages.view(-1, pages.shape[-1])
        for context in self.contexts:
            own = context.tokens
            part = context.rows.attend(q_PHE[own], *expand(cached.index_select(0, context.index_I)))
            merge_into(joined_PHV[own], lse_PH[own], *part)
        out_PHV.copy_(joined_PHV)

    def decode(self, q_BHC: Tensor, pages: Tensor) -> Tensor:
        """Absorbed queries attend to the cached tokens as they are: ``[B, H, latent_dim]``."""
        return self.absorbed.attend(q_BHC, pages)


class PagedLatentAttention:
    """``AttentionBackend`` of ``LatentStep`` for CPUs, in bfloat16 and float32."""

    name = "cpu"
    is_capturable = False
    captured_prompts = None

    def __init__(self, shape: LatentShape, page_size: int, context_chunk: int) -> None:
        """``page_size`` in tokens; ``context_chunk`` is how many cached tokens get keys and values at a time."""
        self.context_chunk = context_chunk
        self.latents = PagedLatents(shape.num_heads, shape.latent_dim, shape.cached_dim, shape.scale, page_size)
        self.sizes = HeadSizes(shape.num_heads, shape.num_heads, shape.query_dim, shape.value_dim, shape.scale)

    @staticmethod
    def takes(shape: LatentShape) -> bool:
        """Whether the kernels are there and attend in this shape."""
        return can_attend_latents(shape.query_dim, shape.cached_dim, torch.empty(0, dtype=shape.cached_dtype))

    def prepare(self, rows: Rows) -> PagedLatentStep:
        """The rows as the kernels read them."""
        ordered = short_last(rows, self._is_short)
        rows, first = ordered.rows, ordered.num_long
        page_size = self.latents.page_size
        return PagedLatentStep(
            num_prefill_tokens=ordered.num_long_tokens,
            slot_mapping_T=pages_of_tokens(rows, page_size) * page_size + rows.positions_T % page_size,
            order_T=ordered.order_T,
            cached_scale=1.0,
            new=ExpandedRows(self.sizes, rows.lengths[:first], rows.lengths[:first], is_causal=True),
            contexts=[self._context(rows, piece) for piece in self._pieces(rows, first)],
            absorbed=LatentRows(
                self.latents, rows.starts[first:], rows.lengths[first:], rows.page_table_RW[first:].contiguous()
            ),
        )

    def _is_short(self, start: int, length: int) -> bool:
        """Whether a row multiplies fewer numbers absorbed: more for each pair of a new token and one that it sees.

        Otherwise what it has cached gets keys and values; for its new tokens both ways take as many.
        """
        latents, sizes = self.latents, self.sizes
        num_pairs = length * start + length * (length + 1) // 2
        more = latents.cached_dim + latents.latent_dim - sizes.key_dim - sizes.value_dim
        turned = latents.cached_dim - latents.latent_dim
        return num_pairs * more <= start * latents.latent_dim * (sizes.key_dim - turned + sizes.value_dim)

    def _pieces(self, rows: Rows, num_rows: int) -> Iterator[ContextPiece]:
        return context_pieces(rows.starts[:num_rows], self.context_chunk)

    def _context(self, rows: Rows, piece: ContextPiece) -> _Context:
        lengths = rows.lengths[piece.rows]
        begin = sum(rows.lengths[: piece.first])
        return _Context(
            tokens=slice(begin, begin + sum(lengths)),
            rows=ExpandedRows(self.sizes, lengths, piece.lengths.tolist(), is_causal=False),
            index_I=piece.slot_mapping(rows.page_table_RW, self.latents.page_size),
        )
