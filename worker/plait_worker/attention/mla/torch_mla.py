"""MLA with plain torch operations: the reference of every other backend, and the CPU's if no kernel is built.

Decode rows are absorbed: what is cached is key and value of one head that all query heads share. Prefill rows are
decompressed, which takes a third of the work. Their cached context follows in chunks, merged by LSE. On a GPU all of it
is computed in float32.

Shapes: T tokens of the step, P those of its prefill rows, B decode rows, N new tokens of one prefill row, I cached
tokens of one chunk, H heads, E elements of a query and key, V in a value, C elements cached of a token, L positions of
a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from plait_kernels.attention import merge
from plait_kernels.kv_cache import as_bytes
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements, KvBProj
from plait_worker.attention.mla.cached_context import load_latents, to_model_dtype
from plait_worker.attention.spec import MlaShape
from plait_worker.attention.torch_batches import QUERY_BLOCK, decode_batches, math_sdpa, pages_of_tokens
from plait_worker.rows import Rows


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """A chunk of a prompt."""

    tokens: slice
    """Its new tokens in P."""
    context_index: Tensor
    """Indices of its cached context in the flat cache ``[pages * page_size, C]``."""


@dataclass(frozen=True, slots=True)
class _DecodeBatch:
    """Decode rows of similar KV length."""

    rows: slice | Tensor
    page_index: Tensor
    """Their pages, one row after the other."""
    mask_B11L: Tensor


@dataclass(frozen=True, slots=True)
class TorchMlaStep:
    """``MlaStep`` of the torch backend."""

    shape: MlaShape
    mla_context_chunk_size: int
    num_prefill_tokens: int
    slot_mapping_T: Tensor
    """See ``MlaStep``."""
    prefill_rows: list[_PrefillRow]
    decode_batches: list[_DecodeBatch]
    gather_buffer: Tensor
    """For the pages of one decode batch; new memory would be mapped again in each layer."""

    @property
    def cached_scale(self) -> float:
        """See ``MlaShape``."""
        return self.shape.cached_scale

    @property
    def order_T(self) -> Tensor | None:
        """None: the plan's order."""
        return None

    @property
    def decode_waits(self) -> bool:
        """See ``MlaStep``."""
        return False

    def prefill(self, q_PHE: Tensor, latent_PC: Tensor, pages: Tensor, kv_b_proj: KvBProj, out_PHV: Tensor) -> None:
        """See ``MlaStep``."""
        k_PHE, v_PHV = kv_b_proj(latent_PC)
        for row in self.prefill_rows:
            new = row.tokens
            out_NHV, lse_NH = attend(q_PHE[new], k_PHE[new], v_PHV[new], self.shape.scale, is_causal=True)
            for latent_IC in self._context(row, pages):
                part_NHV, part_NH = attend(q_PHE[new], *kv_b_proj(latent_IC), self.shape.scale, is_causal=False)
                out_NHV, lse_NH = merge(out_NHV, lse_NH, part_NHV, part_NH)
            out_PHV[new] = out_NHV

    def decode(self, q_BHC: Tensor, pages: Tensor) -> Tensor:
        """See ``MlaStep``."""
        out_BHC = torch.empty_like(q_BHC)
        with math_sdpa(q_BHC.device):
            for batch in self.decode_batches:
                # The heads take the sequence dimension. The rope dims of the values are cut off below.
                # A weight of zero would not hide a NaN that another request left in a page.
                is_hidden_B1L1 = batch.mask_B11L.transpose(2, 3) < 0
                cached_B1LC = self._gather(batch, pages).masked_fill_(is_hidden_B1L1, 0)
                out_BHC[batch.rows] = F.scaled_dot_product_attention(
                    q_BHC[batch.rows][:, None],
                    cached_B1LC,
                    cached_B1LC,
                    attn_mask=batch.mask_B11L,
                    scale=self.shape.scale,
                )[:, 0]
        return out_BHC[..., : self.shape.latent_dim]

    def _gather(self, batch: _DecodeBatch, pages: Tensor) -> Tensor:
        """The batch's cached tokens, ``[B, 1, L, C]``; the next batch overwrites them."""
        gathered = self.gather_buffer[: len(batch.page_index)]
        torch.index_select(as_bytes(pages), 0, batch.page_index, out=as_bytes(gathered))
        return to_model_dtype(gathered, self.shape).view(len(batch.mask_B11L), 1, -1, self.shape.cached_dim)

    def _context(self, row: _PrefillRow, pages: Tensor) -> Iterator[Tensor]:
        """The row's cached context, ``mla_context_chunk_size`` tokens at a time: ``[I, C]``."""
        for begin in range(0, len(row.context_index), self.mla_context_chunk_size):
            yield load_latents(pages, row.context_index[begin : begin + self.mla_context_chunk_size], self.shape)


def attend(q_NHE: Tensor, k_IHE: Tensor, v_IHV: Tensor, scale: float, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of each head, ``[N, H, V]``, and its LSE, float32 base 2 ``[N, H]``.

    ``is_causal`` needs as many keys as queries. Scores, softmax and sums are float32; on a CPU bfloat16 weights
    are rounded once, as in ``plait_worker.attention.mha.torch_mha``.
    """
    if q_NHE.is_cuda:
        return _attend_plainly(q_NHE, k_IHE, v_IHV, scale, is_causal=is_causal)
    value_dim = v_IHV.shape[-1]
    width = max(q_NHE.shape[-1], value_dim)  # the kernel wants queries, keys and values of one width
    q, k, v = (F.pad(x, (0, width - x.shape[-1])).transpose(0, 1)[None] for x in (q_NHE, k_IHE, v_IHV))
    out_1HNW, lse_1HN = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    return out_1HNW[0, ..., :value_dim].transpose(0, 1), lse_1HN[0].T * math.log2(math.e)


def _attend_plainly(
    q_NHE: Tensor, k_IHE: Tensor, v_IHV: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """In float32, a block of queries at a time, which bounds the scores."""
    k_HEI, v_HIV = k_IHE.float().permute(1, 2, 0), v_IHV.float().transpose(0, 1)
    positions_I = torch.arange(len(k_IHE), device=q_NHE.device)
    outs, lses = [], []
    for begin in range(0, len(q_NHE), QUERY_BLOCK):
        scores_HNI = q_NHE[begin : begin + QUERY_BLOCK].float().transpose(0, 1) @ k_HEI * scale
        if is_causal:
            own_N = positions_I[begin : begin + QUERY_BLOCK]
            scores_HNI.masked_fill_(positions_I > own_N[:, None], -torch.inf)
        lse_HN = scores_HNI.logsumexp(dim=-1)
        outs.append(((scores_HNI - lse_HN[..., None]).exp_() @ v_HIV).transpose(0, 1).to(q_NHE.dtype))
        lses.append(lse_HN.T * math.log2(math.e))
    return torch.cat(outs), torch.cat(lses)


class TorchMla:
    """``AttentionBackend`` of ``MlaStep`` on any device."""

    name = "torch"
    is_capturable = False
    captured_prefill = None

    def __init__(self, requirements: BackendRequirements[MlaShape]) -> None:
        self.shape = shape = requirements.spec
        self.page_size = page_size = requirements.page_size
        self.mla_context_chunk_size = requirements.mla_context_chunk_size
        self._gather_buffer = torch.empty(
            0, page_size, shape.cached_dim, dtype=shape.cached_dtype, device=requirements.device
        )

    def prepare(self, rows: Rows) -> TorchMlaStep:
        """Page indices and masks of one step."""
        batches = self._decode_batches(rows)
        return TorchMlaStep(
            shape=self.shape,
            mla_context_chunk_size=self.mla_context_chunk_size,
            num_prefill_tokens=rows.num_prefill_tokens,
            slot_mapping_T=pages_of_tokens(rows, self.page_size) * self.page_size + rows.positions_T % self.page_size,
            prefill_rows=list(self._prefill_rows(rows)),
            decode_batches=batches,
            gather_buffer=self._gather_buffer_for(max((len(batch.page_index) for batch in batches), default=0)),
        )

    def _decode_batches(self, rows: Rows) -> list[_DecodeBatch]:
        page_elements = self.page_size * self.shape.cached_dim
        return [
            _DecodeBatch(batch.rows, batch.table_BW.flatten(), batch.mask_BL[:, None, None])
            for batch in decode_batches(rows, self.page_size, page_elements, self.shape.dtype)
        ]

    def _gather_buffer_for(self, num_pages: int) -> Tensor:
        """The last step's buffer, or a larger one."""
        if num_pages > len(self._gather_buffer):
            self._gather_buffer = self._gather_buffer.new_empty(num_pages, *self._gather_buffer.shape[1:])
        return self._gather_buffer

    def _prefill_rows(self, rows: Rows) -> Iterator[_PrefillRow]:
        first = 0
        for row in range(rows.num_prefill):
            start, length = rows.starts[row], rows.lengths[row]
            positions = torch.arange(start, device=rows.page_table_RW.device)
            page_index = rows.page_table_RW[row].long()[positions // self.page_size]
            yield _PrefillRow(slice(first, first + length), page_index * self.page_size + positions % self.page_size)
            first += length
