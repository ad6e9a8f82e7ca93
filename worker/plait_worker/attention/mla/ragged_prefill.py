"""Prefill rows of latent attention by flashinfer's ragged kernel for Hopper (fa3): keys and values of every head.

New tokens see themselves; what is cached gets keys and values piece by piece, and the results are joined by their
log-sum-exp. The kernel is planned on the host from the host's lengths, once a step for all layers, into pinned memory
that a copy then reads: every step in flight has wrappers of its own, one a piece.

Shapes: P tokens of the prefill rows, N of them in a piece, I cached tokens of a piece, H heads, E numbers in a query
and key, V in a value, C cached of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper
from plait_kernels.attention import merge_into
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements, KvBProj
from plait_worker.attention.lengths import Ints, indptr
from plait_worker.attention.mla.cached_context import ContextChunk, context_chunks, load_latents
from plait_worker.attention.plan_ring import PlanRing
from plait_worker.attention.spec import MlaShape
from plait_worker.rows import Rows

_WORKSPACE_BYTES = 128 << 20
_DIMS = (192, 128)
"""Numbers of a query and key, and of a value, that the kernel was built for."""
_TILE = 128
"""Cached tokens get keys and values in whole tiles: a product takes as long for a part of one, and few sizes of it
come up, whose kernels were all used before."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Cached tokens that some of the prefill tokens see."""

    tokens: slice
    """Where in P those that see them lie."""
    index_I: Tensor
    """int64: where in the flat cache ``[pages * page size, C]`` the cached tokens lie, and what fills the last tile."""
    wrapper: BatchPrefillWithRaggedKVCacheWrapper


@dataclass(frozen=True, slots=True)
class RaggedStep:
    """The prefill rows of one step."""

    shape: MlaShape
    new: BatchPrefillWithRaggedKVCacheWrapper
    chunks: Sequence[Chunk]

    def attend(self, q_PHE: Tensor, latent_PC: Tensor, pages: Tensor, kv_b_proj: KvBProj, out_PHV: Tensor) -> None:
        """See ``MlaStep.prefill``."""
        k_PHE, v_PHV = kv_b_proj(latent_PC)
        if not self.chunks:
            self.new.run(q_PHE, k_PHE, v_PHV, out=out_PHV)
            return
        _, lse_PH = self.new.run(q_PHE, k_PHE, v_PHV, out=out_PHV, return_lse=True)
        # Rounded once, however many pieces there are: more than one are joined in float32.
        joined_PHV = out_PHV if len(self.chunks) == 1 else out_PHV.float()
        for chunk in self.chunks:
            seen = chunk.tokens
            k_IHE, v_IHV = kv_b_proj(load_latents(pages, chunk.index_I, self.shape))
            part_NHV, part_NH = chunk.wrapper.run(q_PHE[seen], k_IHE, v_IHV, return_lse=True)
            merge_into(joined_PHV[seen], lse_PH[seen], part_NHV, part_NH)
        if joined_PHV is not out_PHV:
            out_PHV.copy_(joined_PHV)


class RaggedPrefill:
    """Plans the prefill rows of one step after the other."""

    def __init__(self, requirements: BackendRequirements[MlaShape]) -> None:
        """Raises ``ValueError`` if the kernel lacks the shape."""
        self.validate(requirements.spec)
        self.shape, self.page_size = requirements.spec, requirements.page_size
        self.mla_context_chunk_size = requirements.mla_context_chunk_size
        self.workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=requirements.device)
        self._ring = PlanRing(list[BatchPrefillWithRaggedKVCacheWrapper], requirements.device)

    @staticmethod
    def validate(shape: MlaShape) -> None:
        """Raise ``ValueError`` with the rule that the kernel would break."""
        if (shape.query_dim, shape.value_dim) != _DIMS or shape.dtype != torch.bfloat16:
            raise ValueError(
                f"its prefill takes bfloat16 queries of {_DIMS[0]} and values of {_DIMS[1]} numbers, not "
                f"{str(shape.dtype).removeprefix('torch.')} of {shape.query_dim} and {shape.value_dim}"
            )

    def plan(self, rows: Rows, num: int) -> RaggedStep:
        """The host's work for the first ``num`` rows of a step, at least one."""
        lengths_P = np.array(rows.lengths[:num])
        first_P = np.concatenate(([0], lengths_P.cumsum()))
        with self._ring.take() as wrappers:
            new = plan_ragged(self._wrapper(wrappers, 0), self.shape, lengths_P, lengths_P, is_causal=True)
            chunks = [
                self._chunk(chunk, rows, first_P, self._wrapper(wrappers, 1 + number))
                for number, chunk in enumerate(context_chunks(rows.starts[:num], self.mla_context_chunk_size))
            ]
        return RaggedStep(self.shape, new, chunks)

    def _chunk(
        self, chunk: ContextChunk, rows: Rows, first_P: Ints, wrapper: BatchPrefillWithRaggedKVCacheWrapper
    ) -> Chunk:
        index_I = chunk.slot_mapping(rows.page_table_RW, self.page_size, _TILE)
        lengths = np.array(rows.lengths[chunk.rows])
        tokens = slice(int(first_P[chunk.rows.start]), int(first_P[chunk.rows.stop]))
        return Chunk(tokens, index_I, plan_ragged(wrapper, self.shape, lengths, chunk.lengths, is_causal=False))

    def _wrapper(
        self, wrappers: list[BatchPrefillWithRaggedKVCacheWrapper], number: int
    ) -> BatchPrefillWithRaggedKVCacheWrapper:
        """The slot's wrapper of this number, made when first asked for."""
        if number == len(wrappers):
            wrappers.append(BatchPrefillWithRaggedKVCacheWrapper(self.workspace, "NHD", backend="fa3"))
        return wrappers[number]


def plan_ragged(
    wrapper: BatchPrefillWithRaggedKVCacheWrapper,
    shape: MlaShape,
    lengths_q: Ints,
    lengths_kv: Ints,
    *,
    is_causal: bool,
) -> BatchPrefillWithRaggedKVCacheWrapper:
    """The wrapper, planned for rows with so many queries and keys each."""
    wrapper.plan(
        indptr(lengths_q),
        indptr(lengths_kv),
        shape.num_heads,
        shape.num_heads,
        shape.query_dim,
        shape.value_dim,
        causal=is_causal,
        sm_scale=shape.scale,
        q_data_type=shape.dtype,
    )
    return wrapper
