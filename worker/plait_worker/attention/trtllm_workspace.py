"""What TensorRT-LLM's kernels for Blackwell, as flashinfer packs them, write beside their output.

The bounds are read in flashinfer 0.7.2.post1, csrc/trtllm_fmha_kernel_launcher.cu and trtllm/fmha/kernelParams.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from flashinfer.utils import get_trtllm_gen_multi_ctas_kv_counter_bytes
from torch import Tensor

MAX_SMS = 256
"""No GPU of the kind has more processors (B200: 148)."""
_QUERY_TILE = 128
_STATS_STEP = 256
_STATS_BYTES = 8
_GUARD_BYTES = 1 << 20
# What engines that serve with these kernels give them at least.
_LEAST_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Scratch:
    """Shared by all calls on one stream; both parts must be zero before the first."""

    workspace: Tensor
    """uint8: softmax statistics of calls that return a log-sum-exp, partial sums of rows that are split."""
    counters: Tensor
    """uint8: of the parts of such rows; each call leaves them at zero."""

    @classmethod
    def of(cls, num_heads: int, value_dim: int, max_tokens: int, device: torch.device) -> Scratch:
        """For calls of up to ``max_tokens`` rows or queries with ``num_heads`` heads of ``value_dim`` numbers."""
        counter_bytes = get_trtllm_gen_multi_ctas_kv_counter_bytes(max_tokens, num_heads, MAX_SMS)
        return cls(
            workspace=torch.zeros(workspace_bytes(num_heads, value_dim, max_tokens), dtype=torch.uint8, device=device),
            counters=torch.zeros(counter_bytes, dtype=torch.uint8, device=device),
        )

    def has_room_for_statistics(self, num_heads: int, num_rows: int, longest: int) -> bool:
        """Whether a call over so many rows, the longest of so many queries, can return its log-sum-exp."""
        return statistics_bytes(num_heads, num_rows, longest) <= self.workspace.numel()


def workspace_bytes(num_heads: int, value_dim: int, max_tokens: int) -> int:
    """Enough for one row of ``max_tokens`` queries, and for partial sums on every processor."""
    partial_sums = MAX_SMS * _QUERY_TILE * (value_dim + 2) * 4
    return max(_LEAST_BYTES, partial_sums, statistics_bytes(num_heads, 1, max_tokens))


def statistics_bytes(num_heads: int, num_rows: int, longest: int) -> int:
    """Two floats for each head and query; every row takes as many queries as the longest, in steps of 256."""
    queries = longest + -longest % _STATS_STEP
    return num_heads * num_rows * queries * _STATS_BYTES + _GUARD_BYTES
