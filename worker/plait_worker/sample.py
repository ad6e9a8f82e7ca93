"""One token for every row that samples, and the records of those who want log-probabilities.

Shapes: S rows that sample, V vocabulary, C prompt tokens that get a record, K best tokens, G given ones, W words of a
record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from plait_kernels.sampling import TokenScores, sample_filtered, sample_greedy, sample_random, score_tokens, uniform
from torch import Tensor

from plait_worker.batch import PromptTargets
from plait_worker.masks import RowMasks
from plait_worker.sampling_table import ADJUSTED, MASKED, SamplingMode, SamplingTable
from plait_worker.step_inputs import Ints
from plait_worker.transfer import Download, upload

# Prompt positions whose logits exist at a time: 256 of a vocabulary of 150,000 take 150 MB.
SLICE = 256
_NO_IDS: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Records:
    """Records of several tokens, on their mode to the host: ``logprob f32, rank u32, K ids, K logprobs f32`` each."""

    words: Download
    """int32 ``[S, W]``."""
    counts: Sequence[int]
    """How many of the best tokens each row wants."""
    num_best: int
    """K, the same for every row."""
    scored: Sequence[Ints] = ()
    """Tokens that each row's record has behind its best ones; their log-probabilities end the record. Empty if no
    row has any."""

    def frame(self) -> bytes:
        """The concatenated records; call it as late as ``Download.array``."""
        words_SW = self.words.array()
        if min(self.counts) == self.num_best and not self.scored:
            return words_SW.tobytes()
        scored = self.scored or [_NO_IDS] * len(self.counts)
        rows = zip(words_SW, self.counts, scored, strict=True)
        return b"".join(_shorten(words_W, count, self.num_best, ids) for words_W, count, ids in rows)


def sample(
    logits_SV: Tensor, slots_S: Ints, device_slots_S: Tensor, table: SamplingTable, masks: RowMasks | None = None
) -> Tensor:
    """The next token of each row, int64 ``[S]``; ``slots_S`` on the host and ``device_slots_S`` are the same slots."""
    modes_S = table.mode_N[slots_S]
    if masks is not None:
        modes_S = modes_S | np.where(masks.is_masked_S, MASKED, 0)
    present = np.unique(modes_S)
    if len(present) == 1:
        return _sample_rows(int(present[0]), logits_SV, slots_S, device_slots_S, table, masks)
    ids_S = torch.empty_like(device_slots_S)
    for mode in present:
        indices = np.flatnonzero(modes_S == mode)
        rows = upload(indices, logits_SV.device)
        own_masks = None if masks is None else masks.of_rows(indices)
        ids_S[rows] = _sample_rows(int(mode), logits_SV[rows], slots_S[indices], device_slots_S[rows], table, own_masks)
    return ids_S


def output_records(logits_SV: Tensor, ids_S: Tensor, slots_S: Ints, table: SamplingTable) -> list[Records]:
    """Frame 4 of a step's result: records of the rows that want log-probabilities, in row order."""
    wanted = [(row, num) for row, slot in enumerate(slots_S) if (num := table.num_logprobs[slot]) is not None]
    if not wanted:
        return []
    rows = upload(np.array([row for row, _ in wanted], dtype=np.int64), logits_SV.device)
    scored = [table.scored_ids.get(int(slots_S[row]), _NO_IDS) for row, _ in wanted]
    counts = [num - len(ids) for (_, num), ids in zip(wanted, scored, strict=True)]
    # Nobody reads the record of a row that failed.
    scores = score_tokens(
        logits_SV[rows].float(), ids_S[rows].clamp_min(0), max(counts), _padded(scored, logits_SV.device)
    )
    return [_records(scores, counts, scored if any(map(len, scored)) else ())]


def prompt_records(
    hidden_TD: Tensor, logits: Callable[[Tensor], Tensor], targets: Sequence[PromptTargets]
) -> list[Records]:
    """Frame 5 of a step's result; ``logits`` is the model's head."""
    return [records for target in targets for records in _target_records(hidden_TD, logits, target)]


def _sample_rows(
    mode: int,
    logits_SV: Tensor,
    slots_S: Ints,
    device_slots_S: Tensor,
    table: SamplingTable,
    masks: RowMasks | None,
) -> Tensor:
    if mode & ADJUSTED:
        logits_SV = table.adjust(logits_SV, slots_S, device_slots_S)
    if mode & MASKED and masks is not None:
        logits_SV = masks.apply(logits_SV)
    mode &= ~(ADJUSTED | MASKED)
    if mode == SamplingMode.GREEDY:
        return sample_greedy(logits_SV)
    temperature_S, filters = table.temperature(device_slots_S), table.filters(device_slots_S)
    uniform_S = uniform(*table.seeds_and_indices(device_slots_S))
    if mode == SamplingMode.RANDOM:
        return sample_random(logits_SV, temperature_S, filters.min_p_S, uniform_S)
    return sample_filtered(logits_SV, temperature_S, filters, uniform_S)


def _target_records(hidden_TD: Tensor, logits: Callable[[Tensor], Tensor], target: PromptTargets) -> Iterator[Records]:
    ids_C = upload(target.ids_C, hidden_TD.device)
    hidden_CD = hidden_TD[target.first : target.first + len(ids_C)]
    for hidden, ids in zip(torch.split(hidden_CD, SLICE), torch.split(ids_C, SLICE), strict=True):
        yield _records(score_tokens(logits(hidden), ids, target.num_best), [target.num_best] * len(ids))


def _records(scores: TokenScores, counts: Sequence[int], scored: Sequence[Ints] = ()) -> Records:
    parts = [
        scores.logprob_S.view(torch.int32)[:, None],
        scores.rank_S.to(torch.int32)[:, None],
        scores.best_ids_SK.to(torch.int32),
        scores.best_logprobs_SK.view(torch.int32),
    ]
    if scores.given_logprobs_SG is not None:
        parts.append(scores.given_logprobs_SG.view(torch.int32))
    return Records(Download(torch.cat(parts, dim=1)), counts, scores.best_ids_SK.shape[1], scored)


def _padded(scored: Sequence[Ints], device: torch.device) -> Tensor | None:
    """The rows' tokens ``[S, G]``, filled up with 0; None if there are none."""
    most = max(map(len, scored))
    if most == 0:
        return None
    padded_SG = np.zeros((len(scored), most), dtype=np.int64)
    for row, ids in enumerate(scored):
        padded_SG[row, : len(ids)] = ids
    return upload(padded_SG, device)


def _shorten(words_W: NDArray[np.int32], count: int, num_best: int, scored: Ints) -> bytes:
    ids = words_W[2 : 2 + count]
    logprobs = words_W[2 + num_best : 2 + num_best + count]
    given = words_W[2 + 2 * num_best : 2 + 2 * num_best + len(scored)]
    return np.concatenate((words_W[:2], ids, scored.astype(np.uint32).view(np.int32), logprobs, given)).tobytes()
