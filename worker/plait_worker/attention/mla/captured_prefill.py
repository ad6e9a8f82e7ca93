"""Prefill rows of latent attention in captured steps: absorbed, or by the ragged kernel with a plan for each replay.

The ragged kernel takes its work from lists in the device's memory, at addresses that a captured step keeps; before each
replay they are written anew, for the replay's lengths. Rows that a step lacks share the tokens that fill it up, so that
every token's output is written.

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
from plait_worker.attention.mla.cached_context import even_chunks, filled
from plait_worker.attention.mla.ragged_prefill import Chunk, RaggedStep, plan_ragged
from plait_worker.attention.mla.short_extend import best_captured_size
from plait_worker.attention.plan_ring import PlanRing
from plait_worker.attention.spec import MlaShape
from plait_worker.graph_sizes import PLANNED_TILES, PROMPT_ROWS, TILE, Size
from plait_worker.rows import DeviceContext, Rows

_CHUNK, _SHORT_CONTEXT = 4096, 1024
"""Cached tokens that get keys and values at a time, as many as there is room for even where there are fewer."""
_MAX_CHUNKS = 2
_PLAN_BYTES = 1 << 20
"""Of one piece's lists: 28 for each head and tile of each row, at most 40 tiles, so that 936 heads have room."""


class MlaCapturedPrefill:
    """``CapturedPrefill`` of latent attention on Hopper."""

    def __init__(self, requirements: BackendRequirements[MlaShape], workspace: Tensor) -> None:
        """Allocates the lists, on the workspace's device."""
        self.shape, self.page_size = requirements.spec, requirements.page_size
        self.chunk = min(_CHUNK, requirements.mla_context_chunk_size)
        self.contexts = sorted(
            {0, min(_SHORT_CONTEXT, self.chunk), *(self.chunk * n for n in range(1, _MAX_CHUNKS + 1))}
        )
        lists = [_Lists(workspace) for _ in range(1 + _MAX_CHUNKS)]
        self._ring = PlanRing(lambda: [each.wrapper(self.shape) for each in lists], workspace.device)
        self._planned: Sequence[BatchPrefillWithRaggedKVCacheWrapper] = ()

    def choose(self, roomy: Sequence[Size], starts: Sequence[int], lengths: Sequence[int]) -> Size | None:
        """Absorbed where that takes less of the device's time, or where only launches would be the price of it."""
        return best_captured_size(roomy, starts, lengths)

    def plan(self, size: Size, starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Write the lists of new tokens and of each piece of context; nothing for a step that absorbs."""
        if size.context_tokens is None:
            return
        lengths_P = filled(size.prompt_tokens, size.prompt_rows, lengths)
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


class _Lists:
    """Where the device finds the lists of one piece; every wrapper over them has pinned memory of its own."""

    def __init__(self, workspace: Tensor) -> None:
        self._workspace = workspace
        self._lists = torch.zeros(_PLAN_BYTES, dtype=torch.uint8, device=workspace.device)
        self._ends = [torch.zeros(PROMPT_ROWS + 1, dtype=torch.int32, device=workspace.device) for _ in range(2)]

    def wrapper(self, shape: MlaShape) -> BatchPrefillWithRaggedKVCacheWrapper:
        """Planned for as many tokens as a step may have: it takes no more than in its first plan."""
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
        most_P = filled(PLANNED_TILES[-1] * TILE, PROMPT_ROWS, [])
        return plan_ragged(wrapper, shape, most_P, most_P, is_causal=True)
