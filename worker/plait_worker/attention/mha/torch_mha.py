"""MHA with plain torch operations: the reference of every other backend, and the CPU's if no kernel is built.

On a CPU ``scaled_dot_product_attention`` keeps scores, softmax and sums in float32. With bfloat16 inputs it rounds the
softmax's weights to bfloat16 once (measured against float64 in the tests). On a GPU it computes in float32.

Shapes: T tokens of the step, B decode rows of one batch, C new tokens of one prefill row, L positions
of context, W pages of the widest table, H query heads in G groups of M (one group a key-value head),
D elements of a head, P tokens in a page, N pages, I flat indices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from plait_kernels.kv_cache import PageScales, as_bytes, to_cache_dtype
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.spec import MhaShape
from plait_worker.attention.torch_batches import QUERY_BLOCK, additive_mask, decode_batches, math_sdpa, pages_of_tokens
from plait_worker.rows import Rows


@dataclass(frozen=True, slots=True)
class _Pages:
    """Indices in the flat cache ``[N 2 G, P D]`` of some rows' keys, then their values."""

    index_I: Tensor
    num_rows: int

    def gather(self, pages: Tensor) -> Tensor:
        """``[2, rows, G, L, D]``; L is the whole width of the table."""
        _, _, num_kv_heads, page_size, head_dim = pages.shape
        flat = as_bytes(pages).view(-1, page_size * head_dim).index_select(0, self.index_I)
        return flat.view(pages.dtype).view(2, self.num_rows, num_kv_heads, -1, head_dim)


@dataclass(frozen=True, slots=True)
class _DecodeBatch:
    """Decode rows of similar KV length."""

    tokens: slice | Tensor
    pages: _Pages
    mask_B11L: Tensor
    """Added to the scores: 0 or -inf, in the dtype of the model."""


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """A chunk of a prompt."""

    first_token: int
    start: int
    length: int
    pages: _Pages

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Begin and end of each block of queries in the chunk."""
        for begin in range(0, self.length, QUERY_BLOCK):
            yield begin, min(begin + QUERY_BLOCK, self.length)


@dataclass(frozen=True, slots=True)
class TorchStep:
    """``StepAttention`` of the torch backend."""

    shape: MhaShape
    key_index_I: Tensor
    """Indices in the flat cache ``[N 2 G P, D]`` of the step's keys, one token after the other."""
    value_index_I: Tensor
    prefill: list[_PrefillRow]
    decode: list[_DecodeBatch]
    causal: Tensor
    """``[QUERY_BLOCK, longest + QUERY_BLOCK]``: 0 where query j sees column m, else -inf.

    It sees ``m <= longest + j``, and with a window ``m > longest + j - window``.
    """

    def forward(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pages: Tensor, scales: PageScales) -> Tensor:
        """See ``StepAttention``."""
        head_dim = self.shape.head_dim
        flat, factor = as_bytes(pages).view(-1, head_dim), self.shape.scale * scales.k
        k, v = to_cache_dtype(k_TGD, pages.dtype, scales.k), to_cache_dtype(v_TGD, pages.dtype, scales.v)
        flat.index_copy_(0, self.key_index_I, as_bytes(k).reshape(-1, head_dim))
        flat.index_copy_(0, self.value_index_I, as_bytes(v).reshape(-1, head_dim))
        q_TGMD = q_THD.reshape(len(q_THD), self.shape.num_kv_heads, -1, head_dim)
        out_TGMD = torch.empty_like(q_TGMD, memory_format=torch.contiguous_format)
        with math_sdpa(q_THD.device):
            for row in self.prefill:
                self._attend_prefill(row, q_TGMD, pages, factor, out_TGMD)
            for batch in self.decode:
                self._attend_decode(batch, q_TGMD, pages, factor, out_TGMD)
        return (out_TGMD if scales.v == 1 else out_TGMD * scales.v).flatten(1, 2)

    def _attend_decode(
        self, batch: _DecodeBatch, q_TGMD: Tensor, pages: Tensor, factor: float, out_TGMD: Tensor
    ) -> None:
        """The M queries of a key-value head see the same keys: they take the sequence dimension."""
        # A weight of zero would not hide a NaN that another request left in a page.
        is_hidden_B1L1 = batch.mask_B11L.transpose(2, 3) < 0
        k_BGLD, v_BGLD = batch.pages.gather(pages).to(q_TGMD.dtype).masked_fill_(is_hidden_B1L1, 0)
        out_TGMD[batch.tokens] = F.scaled_dot_product_attention(
            q_TGMD[batch.tokens],
            k_BGLD,
            v_BGLD,
            attn_mask=batch.mask_B11L,
            scale=factor,
        )

    def _attend_prefill(self, row: _PrefillRow, q_TGMD: Tensor, pages: Tensor, factor: float, out_TGMD: Tensor) -> None:
        k_GLD, v_GLD = batch_of_one(row.pages.gather(pages).to(q_TGMD.dtype))
        q_GMCD = q_TGMD[row.first_token : row.first_token + row.length].permute(1, 2, 0, 3)
        heads = q_GMCD.shape[1]
        for begin, end in row.blocks():
            seen = slice(self._first_seen(row.start + begin), row.start + end)
            out_GMCD = F.scaled_dot_product_attention(
                q_GMCD[:, :, begin:end],
                k_GLD[:, None, seen].expand(-1, heads, -1, -1),
                v_GLD[:, None, seen].expand(-1, heads, -1, -1),
                attn_mask=self._causal_mask(row.start + begin, end - begin),
                scale=factor,
            )
            out_TGMD[row.first_token + begin : row.first_token + end] = out_GMCD.permute(2, 0, 1, 3)

    def _first_seen(self, position: int) -> int:
        """The first position that a query at ``position`` sees."""
        return 0 if self.shape.window is None else max(0, position + 1 - self.shape.window)

    def _causal_mask(self, position: int, num_queries: int) -> Tensor:
        """The mask of queries from ``position`` on: the large one, shifted to their diagonal."""
        shift = self.causal.shape[1] - QUERY_BLOCK - position
        return self.causal[:num_queries, shift + self._first_seen(position) : shift + position + num_queries]


def batch_of_one(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values ``[G, L, D]`` of the only row in ``[2, 1, G, L, D]``."""
    return kv[0, 0], kv[1, 0]


class TorchMha:
    """``AttentionBackend`` for any device."""

    name = "torch"
    is_capturable = False
    captured_prefill = None

    def __init__(self, requirements: BackendRequirements[MhaShape]) -> None:
        self.shape, self.page_size = requirements.spec, requirements.page_size

    def prepare(self, rows: Rows) -> TorchStep:
        """Page indices and masks of one step."""
        key_index_TG = self._key_index(rows)
        prefill = self._prefill_rows(rows)
        return TorchStep(
            shape=self.shape,
            key_index_I=key_index_TG.flatten(),
            value_index_I=key_index_TG.flatten() + self.shape.num_kv_heads * self.page_size,
            prefill=prefill,
            decode=list(self._decode_batches(rows)),
            causal=self._causal(max((row.start + row.length for row in prefill), default=0), rows.page_table_RW.device),
        )

    def _key_index(self, rows: Rows) -> Tensor:
        """``[T, G]``: index in the flat cache ``[N 2 G P, D]`` of each token's key of each head."""
        first_T = self._first_slice(pages_of_tokens(rows, self.page_size))
        slice_TG = first_T[:, None] + torch.arange(self.shape.num_kv_heads, device=first_T.device)
        return slice_TG * self.page_size + (rows.positions_T % self.page_size)[:, None]

    def _first_slice(self, page: Tensor) -> Tensor:
        """Index in ``[N 2 G]`` of a page's first key head."""
        return page * (2 * self.shape.num_kv_heads)

    def _pages(self, table_BW: Tensor) -> _Pages:
        """The pages of a table, ordered as ``gather`` needs them: key or value, row, head, page."""
        heads = torch.arange(2 * self.shape.num_kv_heads, device=table_BW.device).view(2, 1, -1, 1)
        index_2BGW = self._first_slice(table_BW.long())[None, :, None, :] + heads
        return _Pages(index_2BGW.flatten(), table_BW.shape[0])

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _prefill_rows(self, rows: Rows) -> list[_PrefillRow]:
        prefill, first_token = [], 0
        for row in range(rows.num_prefill):
            start, length = rows.starts[row], rows.lengths[row]
            width = self._num_pages(start + length)
            prefill.append(_PrefillRow(first_token, start, length, self._pages(rows.page_table_RW[row, None, :width])))
            first_token += length
        return prefill

    def _decode_batches(self, rows: Rows) -> Iterator[_DecodeBatch]:
        first_token = rows.num_prefill_tokens
        page_elements = 2 * self.shape.num_kv_heads * self.page_size * self.shape.head_dim
        for batch in decode_batches(rows, self.page_size, page_elements, self.shape.dtype, self.shape.window):
            yield _DecodeBatch(
                tokens=_shift_index(batch.rows, first_token),
                pages=self._pages(batch.table_BW),
                mask_B11L=batch.mask_BL[:, None, None, :],
            )

    def _causal(self, longest: int, device: torch.device) -> Tensor:
        """``TorchStep.causal``, for all prefill rows and blocks of a step."""
        columns = torch.arange(longest + QUERY_BLOCK, device=device)
        rows = torch.arange(QUERY_BLOCK, device=device)
        is_hidden = columns > longest + rows[:, None]
        if self.shape.window is not None:
            is_hidden |= columns <= longest + rows[:, None] - self.shape.window
        return additive_mask(is_hidden, self.shape.dtype)


def _shift_index(index: slice | Tensor, by: int) -> slice | Tensor:
    """Decode rows have one token each, after those of the prefill rows."""
    return slice(index.start + by, index.stop + by) if isinstance(index, slice) else index + by
