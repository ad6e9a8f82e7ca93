"""Pooled prompts: one vector from the hidden states of a request's tokens.

Shapes: N slots, D the hidden size, T tokens of the step, V prompts that end in it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from plait_proto import POOLS_MEAN
from torch import Tensor

from plait_worker.errors import ensure
from plait_worker.step_inputs import Ints, StepInputs


class PooledSlots:
    """How slots are pooled, and the sums of those whose chunks have begun. Empty in a server without such requests."""

    def __init__(self) -> None:
        self._pooling: dict[int, int] = {}
        self._sums_D: dict[int, Tensor] = {}
        """float32, of the tokens so far."""

    def __contains__(self, slot: int) -> bool:
        """Whether its request is pooled."""
        return slot in self._pooling

    def release(self, slots: Iterable[int]) -> None:
        """The slots are free, or taken anew."""
        if self._pooling:
            for slot in slots:
                self._pooling.pop(slot, None)
                self._sums_D.pop(slot, None)

    def assign(self, new_slots: Iterable[int], pooled_E2: Ints) -> None:
        """Set how new slots are pooled. Raises ``WorkerError`` for another slot."""
        slots = set(new_slots)
        for slot, pooling in pooled_E2.tolist():
            ensure(slot in slots, f"the plan pools slot {slot}, which is not new")
            self._pooling[slot] = pooling

    def has_rows(self, inputs: StepInputs) -> bool:
        """Whether a prefill row of the step is pooled."""
        return bool(self._pooling) and any(slot in self for slot in inputs.slots_R[: inputs.num_prefill].tolist())

    def vectors(self, inputs: StepInputs, hidden_TD: Tensor) -> Tensor | None:
        """float32 ``[V, D]`` of the prompts that end in this step, in row order; None if none does."""
        if not self.has_rows(inputs):
            return None
        vectors, first = [], 0
        for row in range(inputs.num_prefill):
            slot, length = int(inputs.slots_R[row]), int(inputs.lengths_R[row])
            if slot in self:
                hidden_CD = hidden_TD[first : first + length]
                ends = not bool(inputs.has_lookahead_P[row])
                vector_D = self._pool(slot, hidden_CD, int(inputs.starts_R[row]), ends=ends)
                if vector_D is not None:
                    vectors.append(vector_D)
            first += length
        return torch.stack(vectors) if vectors else None

    def _pool(self, slot: int, hidden_CD: Tensor, start: int, *, ends: bool) -> Tensor | None:
        """Take a chunk that begins at position ``start``; the prompt's vector if it ends."""
        if self._pooling[slot] != POOLS_MEAN:
            return hidden_CD[-1].float() if ends else None
        sum_D = hidden_CD.sum(0, dtype=torch.float32)
        if start:
            ensure(slot in self._sums_D, f"slot {slot} is pooled from position {start}, and nothing is before it")
            sum_D = sum_D + self._sums_D[slot]
        if not ends:
            self._sums_D[slot] = sum_D
            return None
        self._sums_D.pop(slot, None)
        return sum_D / (start + len(hidden_CD))
