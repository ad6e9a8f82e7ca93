"""MLA prefill rows in captured steps: absorbed, or decompressed by the ragged kernel with a plan for each replay.

The ragged kernel reads its work lists from device memory, at addresses that a captured step keeps; each replay is
preceded by new lists for its lengths. Unused rows share the padding tokens, so that every token's output is written.

Shapes: C prompt tokens of a captured step in P rows, I tokens that they have cached.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper
from plait_kernels.kv_cache import slot_mapping
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.mla.cached_context import even_chunks, padded_lengths
from plait_worker.attention.mla.ragged_prefill import Chunk, RaggedStep, plan_ragged
from plait_worker.attention.mla.short_extend import best_captured_size
from plait_worker.attention.plan_ring import PlanRing
from plait_worker.attention.spec import MlaShape
from plait_worker.graph_sizes import MOST_PLANNED, PLANNED_PROMPT_ROWS, GraphSize
from plait_worker.rows import DeviceContext, Rows

_CHUNK, _SHORT_CONTEXT = 4096, 1024
"""Cached tokens of a kv_b_proj up-projection, and of the smallest graph's. A graph always runs its full capacity."""
_MAX_CHUNKS = 2
_PLAN_BYTES = 1 << 20
"""Of one chunk's lists: 28 bytes a head and tile of a row, at most 128 tiles: enough for 292 heads."""


class MlaCapturedPrefill:
    """``CapturedPrefill`` of MLA on Hopper."""

    def __init__(self, requirements: BackendRequirements[MlaShape], workspace: Tensor) -> None:
        """Allocates the lists, on the workspace's device."""
        self.shape, self.page_size = requirements.spec, requirements.page_size
        self.chunk = min(_CHUNK, requirements.mla_context_chunk_size)
        self.contexts = sorted(
            {0, min(_SHORT_CONTEXT, self.chunk), *(self.chunk * n for n in range(1, _MAX_CHUNKS + 1))}
        )
        lists = [_PlanBuffers(workspace) for _ in range(1 + _MAX_CHUNKS)]
        self._ring = PlanRing(lambda: [each.wrapper(self.shape) for each in lists], workspace.device)
        self._planned: Sequence[BatchPrefillWithRaggedKVCacheWrapper] = ()

    def choose(self, fitting: Sequence[GraphSize], starts: Sequence[int], lengths: Sequence[int]) -> GraphSize | None:
        """Absorbed if that is faster, or if no planned graph fits and launching would cost more."""
        return best_captured_size(fitting, starts, lengths)

    def plan(self, size: GraphSize, starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Write the lists of the new tokens and of each context chunk; none if the step absorbs."""
        if size.context_tokens is None:
            return
        lengths_P = padded_lengths(size.prompt_tokens, size.prompt_rows, lengths)
        context_P = np.zeros(size.prompt_rows, dtype=np.int64)
        context_P[: len(starts)] = starts
        with self._ring.take() as wrappers:
            plan_ragged(wrappers[0], self.shape, lengths_P, lengths_P, is_causal=True)
            for wrapper, cached_P in zip(
                wrappers[1:], even_chunks(context_P, size.context_tokens, self.chunk), strict=False
            ):
                plan_ragged(wrapper, self.shape, lengths_P, cached_P, is_causal=False)
        self._planned = wrappers

    def step(self, rows: Rows, context: DeviceContext) -> RaggedStep:
        """The prefill rows of the captured step that was planned last."""
        index_I = slot_mapping(rows.page_table_RW, context.row_I, context.position_I, self.page_size)
        tokens = slice(0, rows.num_prefill_tokens)
        chunks = [
            Chunk(tokens, index, wrapper)
            for index, wrapper in zip(index_I.split(self.chunk), self._planned[1:], strict=False)
            if len(index)
        ]
        return RaggedStep(self.shape, self._planned[0], chunks)


class _PlanBuffers:
    """Device lists of one chunk; each wrapper over them has its own pinned memory."""

    def __init__(self, workspace: Tensor) -> None:
        self._workspace = workspace
        self._lists = torch.zeros(_PLAN_BYTES, dtype=torch.uint8, device=workspace.device)
        self._ends = [
            torch.zeros(PLANNED_PROMPT_ROWS + 1, dtype=torch.int32, device=workspace.device) for _ in range(2)
        ]

    def wrapper(self, shape: MlaShape) -> BatchPrefillWithRaggedKVCacheWrapper:
        """Planned for the largest step: the first plan sets the limit."""
        ends_q, ends_kv = self._ends
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=ends_q,
            kv_indptr_buf=ends_kv,
            backend="fa3",
        )
        wrapper.reset_workspace_buffer(self._workspace, self._lists)
        most_P = padded_lengths(MOST_PLANNED, PLANNED_PROMPT_ROWS, [])
        return plan_ragged(wrapper, shape, most_P, most_P, is_causal=True)
