"""Device state of every running request: its pages, its last token, its sampling parameters.

Shapes: N slots (and one dummy), M pages in the longest table, R rows of a step, S rows that sample. All updates are
array operations: a step's cost depends on what changed, not on the number of slots or their context.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from plait_worker.errors import ensure
from plait_worker.pooling import PooledSlots
from plait_worker.sampling_table import SamplingTable
from plait_worker.step_inputs import Bools, Ints, StepInputs, without_void_rows
from plait_worker.transfer import upload

# Attention kernels take tables whose width is a multiple of this.
_TABLE_STEP = 4


class Slots:
    """The slot tables of one rank: tensors on the device, progress on the host."""

    def __init__(
        self,
        num_slots: int,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        device: torch.device,
        vocab_size: int = 0,
    ) -> None:
        """``page_size`` and ``max_model_len`` in tokens; page ``num_pages`` is the dummy that pads the tables.

        Without a ``vocab_size`` no request can change its logits.
        """
        max_pages = -(-max_model_len // page_size)
        self.num_slots = num_slots
        self.sampling = SamplingTable(num_slots, vocab_size, device)
        self.pooled = PooledSlots()
        self._device = device
        self._page_size = page_size
        self._num_pages = num_pages
        self._max_pages = max_pages
        self._page_table_NM = torch.full(
            (num_slots + 1, max_pages + -max_pages % _TABLE_STEP), num_pages, dtype=torch.int32, device=device
        )
        self._last_token_N = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._num_held_N = np.zeros(num_slots, dtype=np.int64)
        self._num_computed_N = np.zeros(num_slots, dtype=np.int64)
        self._is_live_N = np.zeros(num_slots, dtype=np.bool_)
        self._is_fresh_N = np.zeros(num_slots, dtype=np.bool_)
        self._has_token_N = np.zeros(num_slots, dtype=np.bool_)
        self._left_out: set[int] = set()

    @property
    def device(self) -> torch.device:
        """Of the tables."""
        return self._device

    @property
    def max_tokens(self) -> int:
        """Tokens that the longest table holds."""
        return self._max_pages * self._page_size

    @property
    def dummy_slot(self) -> int:
        """A slot that no request takes, with only the dummy page in its table; padding rows use it."""
        return self.num_slots

    def apply(self, inputs: StepInputs) -> None:
        """Free, take and extend slots, in this order. Raises ``WorkerError`` if the plan does not fit the slots."""
        self._free(inputs.freed_F)
        self._open_slots(inputs)
        self._append(inputs.appended_A2)
        restored = inputs.restored_X2[:, 0]
        if len(restored):
            self._check_slots(restored)
            ensure(bool(self._is_fresh_N[restored].all()), "the plan restores a slot that is not new")

    def divert_void_rows(self, inputs: StepInputs) -> StepInputs:
        """Give the rows that follow a token which was not sampled to the dummy slot.

        They were on the wire when the row before them was left out, and start one position too far. A row that starts
        where that one did computes it again.
        """
        if not self._left_out:
            return inputs
        self._check_slots(inputs.slots_R)
        is_left_out_R = np.isin(inputs.slots_R, list(self._left_out))
        void_R: Bools = is_left_out_R & (inputs.starts_R > self._num_computed_N[inputs.slots_R])
        self._left_out.difference_update(inputs.slots_R[is_left_out_R & ~void_R].tolist())
        if not void_R.any():
            return inputs
        ensure(not void_R[: inputs.num_prefill].any(), "a chunk begins behind a token that was not sampled")
        slots_R = np.where(void_R, self.dummy_slot, inputs.slots_R)
        starts_R = np.where(void_R, 0, inputs.starts_R)
        saved_X3 = inputs.saved_X3[~np.isin(inputs.saved_X3[:, 0], inputs.slots_R[void_R])]
        return replace(inputs, slots_R=slots_R, starts_R=starts_R, saved_X3=saved_X3, void_R=void_R)

    def leave_out(self, slots: Ints, num_last_chunks: int) -> None:
        """The rows of these slots, last chunks first, sampled nothing: their last position is computed again."""
        self._num_computed_N[slots] -= 1
        self._has_token_N[slots[:num_last_chunks]] = False
        self._left_out.update(slots.tolist())

    def advance(self, inputs: StepInputs) -> None:
        """Check that the step's rows continue what the slots hold, and count them as computed."""
        inputs = without_void_rows(inputs)
        self._check(inputs)
        slots_R = inputs.slots_R
        self._num_computed_N[slots_R] = inputs.starts_R + inputs.lengths_R
        self._is_fresh_N[slots_R] = False
        self._has_token_N[slots_R[inputs.samples_R]] = True

    def page_table(self, slots_R: Tensor, num_tokens: int) -> Tensor:
        """int32 ``[R, W]``, wide enough for ``num_tokens`` of context, W a multiple of 4."""
        num_pages = -(-num_tokens // self._page_size)
        width = num_pages + -num_pages % _TABLE_STEP
        return self._page_table_NM[:, :width].index_select(0, slots_R)

    def last_tokens(self, slots_R: Tensor) -> Tensor:
        """int64 ``[R]``: the token that each slot sampled last."""
        return self._last_token_N[slots_R]

    def keep_tokens(self, slots_S: Tensor, ids_S: Tensor) -> None:
        """Keep the sampled tokens as inputs of the slots' next rows.

        A row that failed gives token 0: the slot's next row may be on the wire, and nobody wants its outcome.
        """
        self._last_token_N.index_copy_(0, slots_S, ids_S.clamp_min(0))
        self.sampling.count_output(slots_S)

    def num_computed(self, slot: int) -> int:
        """Tokens computed of the slot's request."""
        return int(self._num_computed_N[slot])

    def to_device(self, values: Ints) -> Tensor:
        """The values as int64 on the slots' device."""
        return upload(values, self._device)

    def _free(self, freed_F: Ints) -> None:
        if len(freed_F) == 0:
            return
        self._check_slots(freed_F)
        ensure(bool(self._is_live_N[freed_F].all()), "the plan frees a slot that holds nothing")
        self._is_live_N[freed_F] = False
        self._left_out.difference_update(freed_F.tolist())
        self.sampling.release(freed_F)
        self.pooled.release(freed_F.tolist())

    def _open_slots(self, inputs: StepInputs) -> None:
        new_slots = inputs.new_slots
        is_asked = bool(inputs.adjustments) or len(inputs.scored_E2) > 0 or len(inputs.pooled_E2) > 0
        ensure(bool(new_slots) or not is_asked, "the plan says how a slot samples or is pooled that is not new")
        if not new_slots:
            return
        slots = np.array([new.slot for new in new_slots], dtype=np.int64)
        self._check_slots(slots)
        self._num_held_N[slots] = 0
        self._num_computed_N[slots] = 0
        self._is_live_N[slots] = True
        self._left_out.difference_update(slots.tolist())
        self._is_fresh_N[slots] = True
        self._has_token_N[slots] = False
        self._page_table_NM.index_fill_(0, self.to_device(slots), self._num_pages)
        self.sampling.release(slots)
        self.sampling.assign(new_slots, inputs.adjustments)
        self.sampling.assign_scored(new_slots, inputs.scored_E2)
        self.pooled.release(slots.tolist())
        self.pooled.assign(slots.tolist(), inputs.pooled_E2)

    def _append(self, appended_A2: Ints) -> None:
        if len(appended_A2) == 0:
            return
        ordered_A2 = appended_A2[np.argsort(appended_A2[:, 0], kind="stable")]
        slots_A, pages_A = ordered_A2[:, 0], ordered_A2[:, 1]
        self._check_slots(slots_A)
        ensure(int(pages_A.max()) < self._num_pages, f"the plan names page {pages_A.max()} of {self._num_pages}")
        ensure(bool(self._is_live_N[slots_A].all()), "the plan gives a page to a slot that holds nothing")
        # The rank of each pair among those of its slot, which lie together now.
        first_A = np.searchsorted(slots_A, slots_A, side="left")
        places_A = self._num_held_N[slots_A] + np.arange(len(slots_A)) - first_A
        ensure(int(places_A.max()) < self._max_pages, f"a slot gets more than the {self._max_pages} pages of a context")
        np.add.at(self._num_held_N, slots_A, 1)
        index = (self.to_device(slots_A), self.to_device(places_A))
        self._page_table_NM[index] = self.to_device(pages_A).to(torch.int32)

    def _check(self, inputs: StepInputs) -> None:
        slots_R, starts_R = inputs.slots_R, inputs.starts_R
        self._check_slots(slots_R)
        ensure(len(set(slots_R.tolist())) == len(slots_R), "two rows of the plan have the same slot")
        ensure(bool(self._is_live_N[slots_R].all()), "a row's slot holds nothing")
        room_R = self._num_held_N[slots_R] * self._page_size
        ensure(bool((starts_R + inputs.lengths_R <= room_R).all()), "a row's slot lacks a page for the row's tokens")
        computed_R = self._num_computed_N[slots_R]
        # The slot gained pages that another request has filled, up to the row's first token.
        adopts_R = (starts_R > computed_R) & (starts_R % self._page_size == 0)
        adopts_R[inputs.num_prefill :] = False
        continues_R = (starts_R == computed_R) | self._is_fresh_N[slots_R] | adopts_R
        ensure(bool(continues_R.all()), "a row does not start where its slot's computed tokens end")
        decoding = slots_R[inputs.num_prefill :]
        ensure(bool(self._has_token_N[decoding].all()), "a decode row's slot has not sampled a token")

    def _check_slots(self, slots: Ints) -> None:
        if len(slots):
            ensure(int(slots.max()) < self.num_slots, f"the plan names slot {slots.max()} of {self.num_slots}")
