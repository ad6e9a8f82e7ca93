"""Workspace and counters of TensorRT-LLM's Blackwell kernels (trtllm-gen), as flashinfer packs them.

The sizes are from flashinfer 0.7.2.post1, csrc/trtllm_fmha_kernel_launcher.cu and trtllm/fmha/kernelParams.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from flashinfer.utils import get_trtllm_gen_multi_ctas_kv_counter_bytes
from torch import Tensor

MAX_SMS = 256
"""Upper bound of multiprocessors (B200: 148)."""
_QUERY_TILE = 128
_STATS_STEP = 256
_STATS_BYTES = 8
_GUARD_BYTES = 1 << 20
# What other engines give these kernels at least.
_LEAST_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Scratch:
    """Shared by all calls on one stream; must be zero before the first."""

    workspace: Tensor
    """uint8: softmax statistics of calls that return the LSE, and partial sums of split-KV rows."""
    counters: Tensor
    """uint8: of split-KV rows; each call leaves them at zero."""

    @classmethod
    def of(cls, num_heads: int, value_dim: int, max_tokens: int, device: torch.device) -> Scratch:
        """For calls of up to ``max_tokens`` rows or queries with ``num_heads`` heads of ``value_dim`` elements."""
        counter_bytes = get_trtllm_gen_multi_ctas_kv_counter_bytes(max_tokens, num_heads, MAX_SMS)
        return cls(
            workspace=torch.zeros(workspace_bytes(num_heads, value_dim, max_tokens), dtype=torch.uint8, device=device),
            counters=torch.zeros(counter_bytes, dtype=torch.uint8, device=device),
        )

    def has_room_for_statistics(self, num_heads: int, num_rows: int, longest: int) -> bool:
        """Whether a call over ``num_rows`` rows of up to ``longest`` queries can return the LSE."""
        return statistics_bytes(num_heads, num_rows, longest) <= self.workspace.numel()


def workspace_bytes(num_heads: int, value_dim: int, max_tokens: int) -> int:
    """Enough for one row of ``max_tokens`` queries, and for partial sums on every multiprocessor."""
    partial_sums = MAX_SMS * _QUERY_TILE * (value_dim + 2) * 4
    return max(_LEAST_BYTES, partial_sums, statistics_bytes(num_heads, 1, max_tokens))


def statistics_bytes(num_heads: int, num_rows: int, longest: int) -> int:
    """Two floats for each head and query; each row takes the longest row's queries, in steps of 256."""
    queries = longest + -longest % _STATS_STEP
    return num_heads * num_rows * queries * _STATS_BYTES + _GUARD_BYTES
