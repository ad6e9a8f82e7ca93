"""From a plan's arrays to the tensors of one step.

Shapes: T tokens of the step, R rows, S rows that sample, P prefill rows, C prompt tokens that get a record.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from plait_worker.delta import Delta, Ints
from plait_worker.failure import ensure
from plait_worker.rows import Rows
from plait_worker.slots import Slots


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """The prompt tokens that one prefill row predicts, for a request that wants their log-probabilities."""

    first: int
    """Where in T the row's first token lies; token ``first + i`` predicts target i."""
    ids_C: Ints
    """The tokens predicted."""
    num_best: int
    """K of their records."""


def build_rows(delta: Delta, slots: Slots, vocab: int) -> Rows:
    """The step's rows, with the tokens of decode rows read from the slots.

    Raises ``Failure`` where a token id lies outside the vocabulary.
    """
    check_tokens(delta, vocab)
    ends_R = np.cumsum(delta.lengths_R)
    slots_R = slots.to_device(delta.slots_R)
    prompt_ids = slots.to_device(without_lookaheads(delta))
    return Rows(
        num_prefill=delta.num_prefill,
        slots=delta.slots_R.tolist(),
        starts=delta.starts_R.tolist(),
        lengths=delta.lengths_R.tolist(),
        token_ids_T=torch.cat((prompt_ids, slots.last_tokens(slots_R[delta.num_prefill :]))),
        positions_T=slots.to_device(positions(delta, ends_R)),
        page_table_RW=slots.page_table(slots_R, int((delta.starts_R + delta.lengths_R).max(initial=0))),
        sample_index_S=slots.to_device(ends_R[delta.samples_R] - 1),
    )


def check_tokens(delta: Delta, vocab: int) -> None:
    """Raise ``Failure`` where a token id lies outside the vocabulary."""
    ids = delta.token_ids
    ensure(len(ids) == 0 or int(ids.max()) < vocab, "the plan holds a token id outside the model's vocabulary")


def prompt_targets(delta: Delta, slots: Slots) -> list[PromptTargets]:
    """What the prefill rows that want prompt log-probabilities predict, in row order."""
    wanted = slots.sampling.num_prompt_logprobs
    first = 0
    first_id = 0
    targets = []
    for row in range(delta.num_prefill):
        length, lookahead = int(delta.lengths_R[row]), int(delta.has_lookahead_P[row])
        num_best = wanted[int(delta.slots_R[row])]
        if num_best is not None and length + lookahead > 1:
            ids_C = delta.token_ids[first_id + 1 : first_id + length + lookahead]
            targets.append(PromptTargets(first, ids_C, num_best))
        first += length
        first_id += length + lookahead
    return targets


def positions(delta: Delta, ends_R: Ints) -> Ints:
    """Row r's tokens lie at ``starts[r] ..``: their place in the batch, moved by what lies between the two."""
    shift_R = delta.starts_R - (ends_R - delta.lengths_R)
    positions_T: Ints = np.arange(delta.num_tokens) + np.repeat(shift_R, delta.lengths_R)
    return positions_T


def without_lookaheads(delta: Delta) -> Ints:
    """The prefill rows' tokens that are computed."""
    if not delta.has_lookahead_P.any():
        return delta.token_ids
    num_ids_P = delta.lengths_R[: delta.num_prefill] + delta.has_lookahead_P
    prompt_ids: Ints = np.delete(delta.token_ids, np.cumsum(num_ids_P)[delta.has_lookahead_P] - 1)
    return prompt_ids
