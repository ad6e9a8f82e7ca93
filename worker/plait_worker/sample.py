"""One token for every row that samples, and the records of those who want log-probabilities.

Shapes: S rows that sample, V vocabulary, C prompt tokens that get a record, K best tokens, W words of a record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from plait_kernels.sampling import TokenScores, pick_filtered, pick_greedy, pick_random, score_tokens, uniform
from torch import Tensor

from plait_worker.batch import PromptTargets
from plait_worker.delta import Ints
from plait_worker.sampling_table import SamplingTable, Way

# Prompt positions whose logits exist at a time: 256 of a vocabulary of 150,000 take 150 MB.
_SLICE = 256


def sample(logits_SV: Tensor, slots_S: Ints, device_slots_S: Tensor, table: SamplingTable) -> Tensor:
    """The next token of each row, int64 ``[S]``; ``slots_S`` and ``device_slots_S`` are the same slots twice."""
    ways_S = table.way_N[slots_S]
    present = np.unique(ways_S)
    if len(present) == 1:
        return _pick(Way(present[0]), logits_SV, device_slots_S, table)
    ids_S = torch.empty_like(device_slots_S)
    for way in present:
        rows = torch.from_numpy(np.flatnonzero(ways_S == way)).to(logits_SV.device)
        ids_S[rows] = _pick(Way(way), logits_SV[rows], device_slots_S[rows], table)
    return ids_S


def output_records(logits_SV: Tensor, ids_S: Tensor, slots_S: Ints, table: SamplingTable) -> bytes:
    """Frame 4 of a step's result: the records of the rows whose requests want them, in row order."""
    wanted = [(row, num) for row, slot in enumerate(slots_S) if (num := table.num_logprobs[slot]) is not None]
    if not wanted:
        return b""
    rows = torch.tensor([row for row, _ in wanted], device=logits_SV.device)
    counts = [num for _, num in wanted]
    scores = score_tokens(logits_SV[rows], ids_S[rows], max(counts))
    return _records(scores, counts)


def prompt_records(hidden_TD: Tensor, logits: Callable[[Tensor], Tensor], targets: Sequence[PromptTargets]) -> bytes:
    """Frame 5 of a step's result; ``logits`` is the model's head."""
    return b"".join(_target_records(hidden_TD, logits, target) for target in targets)


def _pick(way: Way, logits_SV: Tensor, slots_S: Tensor, table: SamplingTable) -> Tensor:
    if way is Way.GREEDY:
        return pick_greedy(logits_SV)
    temperature_S, filters = table.temperature(slots_S), table.filters(slots_S)
    uniform_S = uniform(*table.seeds_and_indices(slots_S))
    if way is Way.RANDOM:
        return pick_random(logits_SV, temperature_S, filters.min_p_S, uniform_S)
    return pick_filtered(logits_SV, temperature_S, filters, uniform_S)


def _target_records(hidden_TD: Tensor, logits: Callable[[Tensor], Tensor], target: PromptTargets) -> bytes:
    ids_C = torch.from_numpy(target.ids_C).to(hidden_TD.device)
    hidden_CD = hidden_TD[target.first : target.first + len(ids_C)]
    return b"".join(
        _records(score_tokens(logits(hidden), ids, target.num_best), [target.num_best] * len(ids))
        for hidden, ids in zip(torch.split(hidden_CD, _SLICE), torch.split(ids_C, _SLICE), strict=True)
    )


def _records(scores: TokenScores, counts: Sequence[int]) -> bytes:
    """The records of rows of which row i wants ``counts[i]`` of the best tokens that were found."""
    words_SW = _words(scores)
    num_best = scores.best_ids_SK.shape[1]
    if min(counts) == num_best:
        return words_SW.tobytes()
    return b"".join(_shorten(words_W, count, num_best) for words_W, count in zip(words_SW, counts, strict=True))


def _words(scores: TokenScores) -> NDArray[np.int32]:
    """``logprob f32, rank u32, K ids, K logprobs f32`` a row, as words, in one transfer."""
    words_SW = torch.cat(
        (
            scores.logprob_S.view(torch.int32)[:, None],
            scores.rank_S.to(torch.int32)[:, None],
            scores.best_ids_SK.to(torch.int32),
            scores.best_logprobs_SK.view(torch.int32),
        ),
        dim=1,
    )
    array: NDArray[np.int32] = words_SW.cpu().numpy()
    return array


def _shorten(words_W: NDArray[np.int32], count: int, num_best: int) -> bytes:
    ids = words_W[2 : 2 + count]
    logprobs = words_W[2 + num_best : 2 + num_best + count]
    return np.concatenate((words_W[:2], ids, logprobs)).tobytes()
