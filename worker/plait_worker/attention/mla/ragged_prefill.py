"""Decompressed MLA prefill by flashinfer's ragged kernel for Hopper (fa3): keys and values of every head.

New tokens attend to each other. Cached context is up-projected by kv_b_proj in chunks, and the partial results are
merged by LSE. The kernel is planned once a step for all layers, from host lengths, into pinned memory that is copied
later; so each step in flight has its own wrappers, one a chunk.

Shapes: P tokens of the prefill rows, N of them that see a chunk, I cached tokens of a chunk, H heads, E elements of a
query and key, V in a value, C elements cached of a token.
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
"""Dims of queries and keys, and of values, that the kernel was built for."""
_TILE = 128
"""Cached tokens are padded to whole GEMM tiles: a partial tile takes as long, and few GEMM sizes occur, all of which
were warmed up."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of cached tokens, and the prefill tokens that see it."""

    tokens: slice
    """In P: those that see the chunk."""
    index_I: Tensor
    """int64: indices of the cached tokens in the flat cache ``[pages * page_size, C]``, padded to a whole tile."""
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
        # Rounded once: several chunks are merged in float32.
        merged_PHV = out_PHV if len(self.chunks) == 1 else out_PHV.float()
        for chunk in self.chunks:
            seen = chunk.tokens
            k_IHE, v_IHV = kv_b_proj(load_latents(pages, chunk.index_I, self.shape))
            part_NHV, part_NH = chunk.wrapper.run(q_PHE[seen], k_IHE, v_IHV, return_lse=True)
            merge_into(merged_PHV[seen], lse_PH[seen], part_NHV, part_NH)
        if merged_PHV is not out_PHV:
            out_PHV.copy_(merged_PHV)


class RaggedPrefill:
    """Plans the decompressed rows of each step."""

    def __init__(self, requirements: BackendRequirements[MlaShape]) -> None:
        """Raises ``ValueError`` if the kernel lacks the shape."""
        self.validate(requirements.spec)
        self.shape, self.page_size = requirements.spec, requirements.page_size
        self.mla_context_chunk_size = requirements.mla_context_chunk_size
        self.workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=requirements.device)
        self._ring = PlanRing(list[BatchPrefillWithRaggedKVCacheWrapper], requirements.device)

    @staticmethod
    def validate(shape: MlaShape) -> None:
        """Raises ``ValueError`` with the rule that is broken."""
        if (shape.query_dim, shape.value_dim) != _DIMS or shape.dtype != torch.bfloat16:
            raise ValueError(
                f"its prefill takes bfloat16 with {_DIMS[0]} query dims and {_DIMS[1]} value dims, not "
                f"{str(shape.dtype).removeprefix('torch.')} with {shape.query_dim} and {shape.value_dim}; use torch"
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
        """The ring slot's wrapper of this number, made on first use."""
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
    """The wrapper, planned for rows of these lengths."""
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
