"""A plan as integer arrays on the host.

Shapes: P prefill rows, D decode rows, R = P + D rows, T tokens computed, A appended pages, F freed slots, X snapshots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from plait_proto import IS_LAST_CHUNK, LOOKAHEAD, Adjustment, NewSlot, Plan, read_adjustments

from plait_worker.errors import ensure

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepInputs:  # budget: one field a frame
    """What one step computes, and the updates of the slots before it."""

    freed_F: Ints
    """Slots that are free again."""
    new_slots: Sequence[NewSlot]
    """Slots that take a request."""
    appended_A2: Ints
    """(slot, page): the page is appended to the slot's table."""
    num_prefill: int
    """P."""
    slots_R: Ints
    """Slot of each row, prefill rows first."""
    starts_R: Ints
    """Position of each row's first token."""
    lengths_R: Ints
    """Tokens of each row; 1 for decode rows."""
    samples_R: Bools
    """Rows that sample a token: last chunks and decode rows."""
    has_lookahead_P: Bools
    """Rows whose token ids include one more token, which is not computed."""
    token_ids: Ints
    """Tokens of the prefill rows, row by row, with lookahead tokens."""
    adjustments: Sequence[Adjustment] = ()
    """What new slots change about their logits."""
    scored_E2: Ints = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    """(slot, token id): the slot's records have the token behind the best ones, in this order."""
    pooled_E2: Ints = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    """(new slot, pooling): the hidden states of the slot's prompt are pooled."""
    restored_X2: Ints = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    """(new slot, snapshot): the slot's request begins behind what the snapshot's did."""
    saved_X3: Ints = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))
    """(slot, position, snapshot): what the slot's state is before the token at this position."""
    void_R: Bools | None = None
    """Decode rows of the dummy slot: they follow a token that was not sampled. None if there are none."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.lengths_R.sum())


def without_void_rows(inputs: StepInputs) -> StepInputs:
    """The rows of requests."""
    if inputs.void_R is None:
        return inputs
    kept_R = ~inputs.void_R
    return replace(
        inputs,
        slots_R=inputs.slots_R[kept_R],
        starts_R=inputs.starts_R[kept_R],
        lengths_R=inputs.lengths_R[kept_R],
        samples_R=inputs.samples_R[kept_R],
        void_R=None,
    )


def dummy_step(inputs: StepInputs, dummy_slot: int) -> StepInputs:
    """A step without rows, with one decode row of ``dummy_slot``, which samples nothing."""
    ensure(len(inputs.slots_R) == 0, "a dummy row beside rows of requests")
    zero = np.zeros(1, dtype=np.int64)
    return replace(inputs, slots_R=zero + dummy_slot, starts_R=zero, lengths_R=zero + 1, samples_R=zero != 0)


def read_plan(plan: Plan) -> StepInputs:
    """The arrays of a decoded and validated plan."""
    rows = _words(plan.rows)
    has_drafts = len(rows) != 4 * plan.num_prefill + 2 * plan.num_decode or len(plan.trimmed_slots) > 0
    ensure(not has_drafts, "the plan has drafts, and this worker computes one token a decode row")
    ensure(len(plan.other_pages) == 0, "the plan has pages of several kinds, and this worker keeps one kind")
    prefill_P4 = rows[: 4 * plan.num_prefill].reshape(-1, 4)
    decode_D2 = rows[4 * plan.num_prefill :].reshape(-1, 2)
    flags_P = prefill_P4[:, 3]
    ones_D = np.ones(len(decode_D2), dtype=np.int64)
    return StepInputs(
        freed_F=_words(plan.freed_slots),
        new_slots=plan.new_slots,
        adjustments=tuple(read_adjustments(memoryview(plan.adjustments))) if len(plan.adjustments) else (),
        scored_E2=_words(plan.scored_ids).reshape(-1, 2),
        pooled_E2=_words(plan.pooled_slots).reshape(-1, 2),
        appended_A2=_words(plan.appended_pages).reshape(-1, 2),
        num_prefill=plan.num_prefill,
        slots_R=np.concatenate((prefill_P4[:, 0], decode_D2[:, 0])),
        starts_R=np.concatenate((prefill_P4[:, 1], decode_D2[:, 1])),
        lengths_R=np.concatenate((prefill_P4[:, 2], ones_D)),
        samples_R=np.concatenate(((flags_P & IS_LAST_CHUNK) != 0, ones_D != 0)),
        has_lookahead_P=(flags_P & LOOKAHEAD) != 0,
        token_ids=_words(plan.token_ids),
        restored_X2=_words(plan.restored_slots).reshape(-1, 2),
        saved_X3=_words(plan.saved_slots).reshape(-1, 3),
    )


def _words(frame: bytes | memoryview) -> Ints:
    return np.frombuffer(frame, dtype="<u4").astype(np.int64)
