"""Rows over pages that hold earlier context, for any backend; the reference is float64.

What no row may see is 1000. Shapes as in `plait_worker.attention`; O dims of a head that rope does not rotate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from plait_kernels.attention import attend
from plait_kernels.kv_cache import FP8, UNSCALED, as_bytes, to_cache_dtype
from plait_kernels.mla import CacheTarget, store_latent
from plait_worker.attention.backend import AttentionBackend, MlaStep, requirements_for
from plait_worker.attention.model_attention import ModelAttention
from plait_worker.attention.selection import choose_attention
from plait_worker.attention.spec import AttentionSpec, MhaShape, MlaShape
from plait_worker.rows import Rows
from torch import Tensor

CPU = torch.device("cpu")
UNSEEN = 1000.0
Spans = Sequence[tuple[int, int]]
"""Start and length of each row."""


def mha_shape(num_heads: int = 8, num_kv_heads: int = 2, head_dim: int = 128) -> MhaShape:
    return MhaShape(num_heads, num_kv_heads, head_dim, 0.7 * head_dim**-0.5, torch.bfloat16)


def mla_shape(num_heads: int = 8, latent_dim: int = 512, query_dim: int = 192, **changes: Any) -> MlaShape:
    settings = {
        "latent_dim": latent_dim,
        "cached_dim": latent_dim + 64,
        "query_dim": query_dim,
        "value_dim": 128,
        "scale": 1.3 * query_dim**-0.5,
        "dtype": torch.bfloat16,
        "cached_dtype": torch.bfloat16,
    }
    return MlaShape(num_heads=num_heads, **{**settings, **changes})


def cpu_attention(
    specs: Sequence[AttentionSpec], page_size: int, mla_context_chunk_size: int, max_tokens: int = 0
) -> ModelAttention:
    """What `auto` takes on a CPU."""
    return choose_attention("auto", requirements_for(specs, page_size, mla_context_chunk_size, max_tokens, CPU))


class Tables:
    """The rows' pages, scattered over the last ones of a pool."""

    def __init__(
        self, prefill: Spans, decode: Spans, page_size: int, device: torch.device = CPU, num_pages: int = 0
    ) -> None:
        self.page_size, self.device = page_size, device
        self.starts = [start for start, _ in (*prefill, *decode)]
        self.lengths = [length for _, length in (*prefill, *decode)]
        widths = [-(-(start + length) // page_size) for start, length in (*prefill, *decode)]
        self.num_pages = max(num_pages, sum(widths) + 3)
        ids = iter((self.num_pages - 1 - torch.randperm(sum(widths) + 3)).tolist())
        self.pages = [[next(ids) for _ in range(width)] for width in widths]
        width = -(-max(widths) // 4) * 4
        self.rows = Rows(
            num_prefill=len(prefill),
            slots=list(range(len(widths))),
            starts=self.starts,
            lengths=self.lengths,
            token_ids_T=torch.zeros(sum(self.lengths), dtype=torch.int64, device=device),
            positions_T=torch.cat(
                [torch.arange(s, s + n, device=device) for s, n in zip(self.starts, self.lengths, strict=True)]
            ),
            page_table_RW=torch.tensor(
                [table + [self.num_pages] * (width - len(table)) for table in self.pages],
                dtype=torch.int32,
                device=device,
            ),
            sample_index_S=torch.zeros(0, dtype=torch.int64, device=device),
        )

    def slots(self, row: int) -> tuple[Tensor, Tensor]:
        """Page and offset of what the row cached before this step."""
        positions = torch.arange(self.starts[row], device=self.device)
        pages = torch.tensor(self.pages[row], device=self.device)
        return pages[positions // self.page_size], positions % self.page_size

    def new(self, contexts: Sequence[Tensor]) -> Tensor:
        """The last tokens of each row's context: those of this step."""
        return torch.cat([context[start:] for context, start in zip(contexts, self.starts, strict=True)])


class MhaCase:
    """One MHA or GQA layer."""

    def __init__(self, shape: MhaShape, prefill: Spans, decode: Spans, page_size: int = 32) -> None:
        torch.manual_seed(0)
        self.shape, self.tables = shape, Tables(prefill, decode, page_size)
        size = (2, shape.num_kv_heads, page_size, shape.head_dim)
        self.pages = torch.full((self.tables.num_pages + 1, *size), UNSEEN, dtype=shape.dtype)
        self.contexts = [
            torch.randn(s + n, 2, shape.num_kv_heads, shape.head_dim).to(shape.dtype)
            for s, n in zip(self.tables.starts, self.tables.lengths, strict=True)
        ]
        for row, kv in enumerate(self.contexts):
            page, offset = self.tables.slots(row)
            self.pages[page, :, :, offset] = kv[: self.tables.starts[row]]
        self.q = torch.randn(sum(self.tables.lengths), shape.num_heads, shape.head_dim).to(shape.dtype)

    def error(self, backend: AttentionBackend[Any]) -> float:
        """Largest difference from float64 over the largest value."""
        new = self.tables.new(self.contexts)
        out = backend.prepare(self.tables.rows).forward(self.q, new[:, 0], new[:, 1], self.pages, UNSCALED)
        pairs = zip(self.q.double().split(self.tables.lengths), self.contexts, strict=True)
        right = torch.cat([attend(q, kv[:, 0].double(), kv[:, 1].double(), self.shape.scale) for q, kv in pairs])
        return difference(out, right)


class MlaCase:
    """One MLA layer."""

    def __init__(
        self,
        shape: MlaShape,
        prefill: Spans,
        decode: Spans,
        page_size: int = 32,
        device: torch.device = CPU,
        num_pages: int = 0,
    ) -> None:
        torch.manual_seed(0)
        self.shape, self.tables = shape, Tables(prefill, decode, page_size, device, num_pages)
        unseen = to_cache_dtype(torch.full((1,), UNSEEN, dtype=shape.dtype, device=device), shape.cached_dtype, 1.0)
        self.pages = unseen.expand(self.tables.num_pages + 1, page_size, shape.cached_dim).contiguous()
        self.contexts = [
            torch.randn(start + length, shape.cached_dim, device=device).to(shape.dtype)
            for start, length in zip(self.tables.starts, self.tables.lengths, strict=True)
        ]
        for row, context in enumerate(self.contexts):
            as_bytes(self.pages)[self.tables.slots(row)] = as_bytes(self._stored(context[: self.tables.starts[row]]))
        still = shape.query_dim - (shape.cached_dim - shape.latent_dim)
        self.key_HOL, self.value_HVL = (
            (torch.randn(shape.num_heads, width, shape.latent_dim, device=device) * shape.latent_dim**-0.5).to(
                shape.dtype
            )
            for width in (still, shape.value_dim)
        )
        # As one GEMM writes them: after a token's queries, its compressed KV.
        width = shape.num_heads * shape.query_dim
        product = torch.randn(sum(self.tables.lengths), width + shape.cached_dim, device=device).to(shape.dtype)
        self.q = product[:, :width].unflatten(1, (shape.num_heads, shape.query_dim))

    def error(self, backend: AttentionBackend[Any]) -> float:
        """Largest difference from float64 over the largest value, of a layer between its projections."""
        step = backend.prepare(self.tables.rows)
        given, right = self.attended(step), self._right()
        return difference(given, right if step.order_T is None else right[step.order_T])

    def attended(self, step: MlaStep) -> Tensor:
        """The layer's result, in the step's order."""
        q, latent_TC = self.q, self.tables.new(self.contexts)
        if step.order_T is not None:
            q, latent_TC = q[step.order_T], latent_TC[step.order_T]
        num = step.num_prefill_tokens
        store_latent(latent_TC, CacheTarget(self.pages, step.slot_mapping_T, step.cached_scale))
        out_THV: Tensor = q.new_empty(*q.shape[:2], self.shape.value_dim)
        if num:
            step.prefill(q[:num], latent_TC[:num], self.pages, self._kv_b_proj, out_THV[:num])
        if num < len(q):
            absorbed = torch.einsum("tho,hol->thl", q[num:, :, : self.key_HOL.shape[1]], self.key_HOL)
            queries = torch.cat((absorbed, q[num:, :, self.key_HOL.shape[1] :]), dim=2)
            out_THV[num:] = torch.einsum("thl,hvl->thv", step.decode(queries, self.pages), self.value_HVL)
        return out_THV

    def _right(self) -> Tensor:
        seen = torch.cat(self.contexts)
        if self.shape.cached_dtype == FP8:  # what the pages keep of it
            seen = self._stored(seen).double() * self.shape.cached_scale
        sizes = [len(context) for context in self.contexts]
        k, v = (each.split(sizes) for each in self._kv_b_proj(seen.double()))
        rows = zip(self.q.double().split(self.tables.lengths), k, v, strict=True)
        return torch.cat([attend(*row, self.shape.scale) for row in rows])

    def _stored(self, numbers: Tensor) -> Tensor:
        return to_cache_dtype(numbers, self.shape.cached_dtype, self.shape.cached_scale)

    def _kv_b_proj(self, latent_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Slices of one tensor, as one GEMM writes them."""
        latent_NL, key_NR = latent_NC[:, : self.shape.latent_dim], latent_NC[:, self.shape.latent_dim :]
        key_NHO, value_NHV = (
            torch.einsum("nl,hxl->nhx", latent_NL, up.to(latent_NL.dtype)) for up in (self.key_HOL, self.value_HVL)
        )
        shared_NHR = key_NR[:, None].expand(-1, self.shape.num_heads, -1)
        both = torch.cat((key_NHO, shared_NHR, value_NHV), dim=2)
        return both[..., : self.shape.query_dim], both[..., self.shape.query_dim :]


def difference(given: Tensor, right: Tensor) -> float:
    """NaN if a value is NaN."""
    return float((given.double() - right).abs().max() / right.abs().max())
