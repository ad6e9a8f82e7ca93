"""From a plan's arrays to the tensors of one step.

Shapes: T tokens of the step, R rows, S rows that sample, P prefill rows, C prompt tokens that get a record.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from plait_worker.errors import ensure
from plait_worker.rows import Rows, Save
from plait_worker.slots import Slots
from plait_worker.step_inputs import Ints, StepInputs


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """The prompt tokens that one prefill row predicts, for a request that wants their log-probabilities."""

    first: int
    """Index in T of the row's first token; token ``first + i`` predicts target i."""
    ids_C: Ints
    """The tokens predicted."""
    num_best: int
    """K of their records."""


def build_rows(inputs: StepInputs, slots: Slots, vocab: int) -> Rows:
    """The step's rows, with the tokens of decode rows read from the slots.

    Raises ``WorkerError`` if a token id lies outside the vocabulary.
    """
    check_tokens(inputs, vocab)
    ends_R = np.cumsum(inputs.lengths_R)
    slots_R = slots.to_device(inputs.slots_R)
    prompt_ids = slots.to_device(without_lookaheads(inputs))
    return Rows(
        num_prefill=inputs.num_prefill,
        slots=inputs.slots_R.tolist(),
        starts=inputs.starts_R.tolist(),
        lengths=inputs.lengths_R.tolist(),
        token_ids_T=torch.cat((prompt_ids, slots.last_tokens(slots_R[inputs.num_prefill :]))),
        positions_T=slots.to_device(positions(inputs, ends_R)),
        page_table_RW=slots.page_table(slots_R, int((inputs.starts_R + inputs.lengths_R).max(initial=0))),
        sample_index_S=slots.to_device(ends_R[inputs.samples_R] - 1),
        saves=read_saves(inputs) if len(inputs.saved_X3) else (),
    )


def read_saves(inputs: StepInputs) -> list[Save]:
    """The snapshots that the step takes. Raises ``WorkerError`` if one lies outside its slot's row."""
    row_of = {slot: row for row, slot in enumerate(inputs.slots_R.tolist())}
    saves = []
    for slot, position, snapshot in inputs.saved_X3.tolist():
        ensure(slot in row_of, f"the plan saves slot {slot}, which has no row")
        row = row_of[slot]
        start, length = int(inputs.starts_R[row]), int(inputs.lengths_R[row])
        ensure(
            start < position <= start + length,
            f"the plan saves slot {slot} before position {position}, and its row computes {length} tokens from {start}",
        )
        saves.append(Save(row, position, snapshot))
    return saves


def check_tokens(inputs: StepInputs, vocab: int) -> None:
    """Raise ``WorkerError`` if a token id lies outside the vocabulary."""
    ids = inputs.token_ids
    ensure(len(ids) == 0 or int(ids.max()) < vocab, "the plan holds a token id outside the model's vocabulary")


def prompt_targets(inputs: StepInputs, slots: Slots) -> list[PromptTargets]:
    """Targets of the prefill rows that want prompt log-probabilities, in row order."""
    wanted = slots.sampling.num_prompt_logprobs
    first = 0
    first_id = 0
    targets = []
    for row in range(inputs.num_prefill):
        length, lookahead = int(inputs.lengths_R[row]), int(inputs.has_lookahead_P[row])
        num_best = wanted[int(inputs.slots_R[row])]
        if num_best is not None and length + lookahead > 1:
            ids_C = inputs.token_ids[first_id + 1 : first_id + length + lookahead]
            targets.append(PromptTargets(first, ids_C, num_best))
        first += length
        first_id += length + lookahead
    return targets


def positions(inputs: StepInputs, ends_R: Ints) -> Ints:
    """Position ids ``[T]``; row r's begin at ``starts[r]``."""
    shift_R = inputs.starts_R - (ends_R - inputs.lengths_R)
    positions_T: Ints = np.arange(inputs.num_tokens) + np.repeat(shift_R, inputs.lengths_R)
    return positions_T


def without_lookaheads(inputs: StepInputs) -> Ints:
    """The prefill rows' token ids without their lookahead tokens."""
    if not inputs.has_lookahead_P.any():
        return inputs.token_ids
    num_ids_P = inputs.lengths_R[: inputs.num_prefill] + inputs.has_lookahead_P
    prompt_ids: Ints = np.delete(inputs.token_ids, np.cumsum(num_ids_P)[inputs.has_lookahead_P] - 1)
    return prompt_ids
