"""Attention with plain torch operations: the CPU's backend and the oracle of every other one."""

from __future__ import annotations

from plait_worker.attention import AttentionShape, StepAttention
from plait_worker.rows import Rows


class TorchAttention:
    """``AttentionBackend`` for any device; scores, softmax and sums are float32."""

    def __init__(self, shape: AttentionShape, page_size: int) -> None:
        """``page_size`` in tokens."""
        self.shape = shape
        self.page_size = page_size

    def prepare(self, rows: Rows) -> StepAttention:
        """The page indices and the order of work of one step."""
        raise NotImplementedError
