"""Sampling parameters of each slot, on the device, and each slot's mode, on the host.

Shapes: N slots, S rows that sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from plait_kernels.sampling import Filters
from plait_proto import Adjustment, NewSlot
from torch import Tensor

from plait_worker.adjusted_slots import AdjustedSlots
from plait_worker.errors import ensure
from plait_worker.masks import MaskTable
from plait_worker.step_inputs import Ints
from plait_worker.transfer import upload

# Below this, softmax(logits / temperature) is 1 for the best token, and the division may overflow.
_COLDEST = 1e-5


class SamplingMode(IntEnum):
    """What sampling a token needs."""

    GREEDY = 0
    """An argmax."""
    RANDOM = 1
    """A random number and the probabilities in vocabulary order."""
    FILTERED = 2
    """The best tokens in order as well: top-k or top-p."""


ADJUSTED = 4
"""Bit of a slot's mode: it changes its logits before a token is sampled."""
MASKED = 8
"""Bit of a row's mode: it samples under a mask."""


class SamplingTable:
    """Sampling parameters of every slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """Every slot is greedy until a request takes it; the device has one more, the dummy slot."""
        self.adjusted = AdjustedSlots(vocab_size, device)
        self.masks = MaskTable(vocab_size, device)
        self.mode_N: NDArray[np.int8] = np.full(num_slots, SamplingMode.GREEDY, dtype=np.int8)
        self.num_logprobs: list[int | None] = [None] * num_slots
        """Best tokens that a slot wants with each output token; None: no log-probabilities."""
        self.num_prompt_logprobs: list[int | None] = [None] * num_slots
        """The same with each prompt token."""
        self.scored_ids: dict[int, Ints] = {}
        """Tokens that a slot's records have behind the best ones."""
        self._device = device
        self._vocab = vocab_size
        # temperature, top_p, min_p
        self._floats_N3 = torch.zeros((num_slots + 1, 3), dtype=torch.float32, device=device)
        # top_k, seed, index of the next output token
        self._ints_N3 = torch.zeros((num_slots + 1, 3), dtype=torch.int64, device=device)

    def release(self, slots: Ints) -> None:
        """The slots are free."""
        if len(self.adjusted):
            self.adjusted.release(slots.tolist())
        if self.scored_ids:
            for slot in slots.tolist():
                self.scored_ids.pop(slot, None)

    def assign(self, new_slots: Sequence[NewSlot], adjustments: Iterable[Adjustment] = ()) -> None:
        """Set what the new slots' requests ask for. Raises ``WorkerError`` if an adjustment is of another slot."""
        slots = [new.slot for new in new_slots]
        self.mode_N[slots] = [_mode(new) for new in new_slots]
        for new in new_slots:
            self.num_logprobs[new.slot] = new.logprobs
            self.num_prompt_logprobs[new.slot] = new.prompt_logprobs
        index = upload(np.array(slots, dtype=np.int64), self._device)
        floats = [(new.temperature, new.top_p, new.min_p) for new in new_slots]
        ints = [(new.top_k, _signed(new.seed), new.next_output) for new in new_slots]
        self._floats_N3[index] = upload(np.array(floats, dtype=np.float32), self._device)
        self._ints_N3[index] = upload(np.array(ints, dtype=np.int64), self._device)
        for adjustment in adjustments:
            is_new = adjustment.slot in slots and adjustment.slot not in self.adjusted
            ensure(is_new, f"the plan adjusts slot {adjustment.slot}, which is not new, or twice")
            self.adjusted.assign(adjustment)
            self.mode_N[adjustment.slot] |= ADJUSTED

    def assign_scored(self, new_slots: Sequence[NewSlot], scored_E2: Ints) -> None:
        """Set the tokens of which new slots want log-probabilities besides the best ones'.

        Raises ``WorkerError`` for another slot, a token outside the vocabulary, or more tokens than records hold.
        """
        for new in new_slots if len(scored_E2) else ():
            ids = scored_E2[scored_E2[:, 0] == new.slot, 1]
            if len(ids):
                ensure(int(ids.max()) < self._vocab, "a scored token is outside the vocabulary")
                ensure(len(ids) <= (new.logprobs or 0), f"slot {new.slot} has more scored tokens than its records hold")
                self.scored_ids[new.slot] = ids
        num_taken = sum(len(self.scored_ids.get(new.slot, ())) for new in new_slots)
        ensure(num_taken == len(scored_E2), "the plan scores tokens of a slot that is not new")

    def is_plain(self, slots_S: Ints) -> bool:
        """Whether the rows of these slots are greedy, change no logits and want no log-probabilities."""
        return not self.mode_N[slots_S].any() and not self.wants_logprobs(slots_S)

    def wants_logprobs(self, slots_S: Ints) -> bool:
        """Whether a row of these slots wants log-probabilities."""
        return any(self.num_logprobs[slot] is not None for slot in slots_S.tolist())

    def temperature(self, slots_S: Tensor) -> Tensor:
        """float32 ``[S]``."""
        return self._floats_N3[slots_S, 0]

    def filters(self, slots_S: Tensor) -> Filters:
        """Top-k, top-p and min-p of the rows."""
        floats_S3 = self._floats_N3[slots_S]
        return Filters(top_k_S=self._ints_N3[slots_S, 0], top_p_S=floats_S3[:, 1], min_p_S=floats_S3[:, 2])

    def seeds_and_indices(self, slots_S: Tensor) -> tuple[Tensor, Tensor]:
        """int64 ``[S]`` each: the seed's bits and the index of the next output token."""
        ints_S3 = self._ints_N3[slots_S]
        return ints_S3[:, 1], ints_S3[:, 2]

    def adjust(self, logits_SV: Tensor, slots_S: Ints, device_slots_S: Tensor) -> Tensor:
        """New logits of slots that all change theirs."""
        return self.adjusted.apply(logits_SV, slots_S, self._ints_N3[device_slots_S, 2])

    def count_adjusted(self, slots_S: Ints, ids_S: Tensor) -> None:
        """Count the tokens that slots which change their logits have sampled."""
        if len(self.adjusted):
            self.adjusted.count(slots_S, ids_S.clamp_min(0))

    def count_output(self, slots_S: Tensor) -> None:
        """The slots have sampled one more token."""
        self._ints_N3[:, 2].index_add_(0, slots_S, torch.ones_like(slots_S))


def _mode(new: NewSlot) -> SamplingMode:
    if new.temperature < _COLDEST:
        return SamplingMode.GREEDY
    return SamplingMode.FILTERED if new.top_k > 0 or new.top_p < 1 else SamplingMode.RANDOM


def _signed(seed: int) -> int:
    """The same 64 bits as torch's signed integer."""
    return seed - 2**64 if seed >= 2**63 else seed
