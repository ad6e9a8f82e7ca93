"""What requests change about their logits: rows of counts and lists, given out to the slots that ask.

Shapes: R rows, V vocabulary, S rows that sample, H tokens before the last of a bad word, E listed and C closed tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from plait_kernels.sampling import CLOSED, Adjustments, adjust_logits
from plait_proto import Adjustment
from torch import Tensor

from plait_worker.errors import ensure
from plait_worker.step_inputs import Ints
from plait_worker.transfer import upload

MAX_BAD_WORD = 16
"""Tokens of a bad word at most."""
_HISTORY = MAX_BAD_WORD - 1
_FEWEST_ROWS = 4
_ANY = -1
"""Matches any token before the last of a bad word, also none."""
_ALWAYS = np.iinfo(np.int64).max
_Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Lists:
    """A slot's lists, on the host, and its row on the device."""

    row: int
    ids_E: Ints
    bias_E: _Floats
    only_listed: bool
    closed_C: Ints
    """Tokens that are closed while the output is shorter than ``until_C`` and ends with ``after_CH``."""
    until_C: Ints
    after_CH: Ints


@dataclass(frozen=True, slots=True)
class _Batch:
    """The lists of several slots, on the device; kept for the next step, which often has the same."""

    slots: bytes
    rows_S: Tensor
    ends_S: Tensor
    ids_E: Tensor
    bias_E: Tensor
    only_listed_S: Tensor
    index_C: Tensor
    closed_C: Tensor
    until_C: Tensor
    after_CH: Tensor


class AdjustedSlots:
    """The slots that change their logits; none costs nothing."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._device = device
        self._lists: dict[int, _Lists] = {}
        self._free_rows: list[int] = []
        # Twice the times that the output has a token, and one more if the prompt has it.
        self._counts_RV = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        # presence, frequency, repetition
        self._penalties_R3 = torch.zeros((0, 3), dtype=torch.float32, device=device)
        self._history_RH = torch.zeros((0, _HISTORY), dtype=torch.int64, device=device)
        self._batch: _Batch | None = None

    def __len__(self) -> int:
        """Slots that change their logits."""
        return len(self._lists)

    def __contains__(self, slot: int) -> bool:
        """Whether a slot changes its logits."""
        return slot in self._lists

    def release(self, slots: Iterable[int]) -> None:
        """Take the rows of these slots back."""
        self._batch = None
        for slot in slots:
            if (lists := self._lists.pop(slot, None)) is not None:
                self._free_rows.append(lists.row)

    def assign(self, adjustment: Adjustment) -> None:
        """Give a slot its row. Raises ``WorkerError`` for a token outside the vocabulary."""
        self._batch = None
        lists = _read_lists(adjustment, self._take_row())
        prompt, output = _ids(adjustment.prompt_ids), _ids(adjustment.output_ids)
        for ids in (prompt, output, lists.ids_E, lists.closed_C):
            ensure(len(ids) == 0 or int(ids.max()) < self._vocab, "an adjustment names a token outside the vocabulary")
        self._lists[adjustment.slot] = lists
        counts_V = self._counts_RV[lists.row].zero_()
        counts_V[self._upload(prompt)] = 1
        twice = torch.full((len(output),), 2, dtype=torch.int32, device=self._device)
        counts_V.index_add_(0, self._upload(output), twice)
        penalties = (adjustment.presence_penalty, adjustment.frequency_penalty, adjustment.repetition_penalty)
        self._penalties_R3[lists.row] = upload(np.array(penalties, dtype=np.float32), self._device)
        last = np.concatenate((np.full(_HISTORY, _ANY, dtype=np.int64), output))[-_HISTORY:]
        self._history_RH[lists.row] = self._upload(last)

    def apply(self, logits_SV: Tensor, slots_S: Ints, next_output_S: Tensor) -> Tensor:
        """New logits of these slots, all of which change theirs; ``next_output_S`` int64 is on the device."""
        batch = self._batch_of(slots_S)
        adjusted_SV = adjust_logits(
            logits_SV,
            Adjustments(
                counts_RV=self._counts_RV,
                rows_S=batch.rows_S,
                penalties_S3=self._penalties_R3[batch.rows_S],
                ends_S=batch.ends_S,
                ids_E=batch.ids_E,
                bias_E=batch.bias_E,
                only_listed_S=batch.only_listed_S,
            ),
        )
        if len(batch.closed_C):
            self._close(adjusted_SV, batch, next_output_S)
        return adjusted_SV

    def count(self, slots_S: Ints, ids_S: Tensor) -> None:
        """The slots have sampled these tokens, int64 ``[S]`` on the device."""
        chosen = [index for index, slot in enumerate(slots_S.tolist()) if slot in self._lists]
        if not chosen:
            return
        rows_S = self._upload(np.array([self._lists[int(slots_S[index])].row for index in chosen], dtype=np.int64))
        if len(chosen) < len(slots_S):
            ids_S = ids_S[self._upload(np.array(chosen, dtype=np.int64))]
        twice_S = torch.full((len(chosen),), 2, dtype=torch.int32, device=self._device)
        self._counts_RV.view(-1).index_add_(0, rows_S * self._vocab + ids_S, twice_S)
        self._history_RH[rows_S] = torch.cat((self._history_RH[rows_S][:, 1:], ids_S[:, None]), dim=1)

    def _close(self, logits_SV: Tensor, batch: _Batch, next_output_S: Tensor) -> None:
        """Close the ends of outputs that are too short, and the last tokens of bad words, in place."""
        history_CH = self._history_RH[batch.rows_S[batch.index_C]]
        is_after_C = ((batch.after_CH == _ANY) | (batch.after_CH == history_CH)).all(dim=1)
        is_closed_C = is_after_C & (next_output_S[batch.index_C] < batch.until_C)
        closed_C = torch.where(is_closed_C, CLOSED, torch.inf).to(logits_SV.dtype)
        at_C = batch.index_C * self._vocab + batch.closed_C
        logits_SV.view(-1).scatter_reduce_(0, at_C, closed_C, "amin")

    def _batch_of(self, slots_S: Ints) -> _Batch:
        if self._batch is None or self._batch.slots != slots_S.tobytes():
            self._batch = self._upload_batch(slots_S)
        return self._batch

    def _upload_batch(self, slots_S: Ints) -> _Batch:
        lists = [self._lists[slot] for slot in slots_S.tolist()]
        return _Batch(
            slots=slots_S.tobytes(),
            rows_S=self._upload(np.array([each.row for each in lists], dtype=np.int64)),
            ends_S=self._upload(np.cumsum([len(each.ids_E) for each in lists], dtype=np.int64)),
            ids_E=self._upload(np.concatenate([each.ids_E for each in lists])),
            bias_E=upload(np.concatenate([each.bias_E for each in lists]), self._device),
            only_listed_S=upload(np.array([each.only_listed for each in lists]), self._device),
            index_C=self._upload(np.repeat(np.arange(len(lists)), [len(each.closed_C) for each in lists])),
            closed_C=self._upload(np.concatenate([each.closed_C for each in lists])),
            until_C=self._upload(np.concatenate([each.until_C for each in lists])),
            after_CH=self._upload(np.concatenate([each.after_CH for each in lists])),
        )

    def _take_row(self) -> int:
        if not self._free_rows:
            old = len(self._counts_RV)
            new = max(_FEWEST_ROWS, 2 * old)
            self._counts_RV = _grown(self._counts_RV, new)
            self._penalties_R3 = _grown(self._penalties_R3, new)
            self._history_RH = _grown(self._history_RH, new)
            self._free_rows = list(range(old, new))
        return self._free_rows.pop()

    def _upload(self, values: Ints) -> Tensor:
        return upload(values, self._device)


def _grown(values: Tensor, num_rows: int) -> Tensor:
    grown = values.new_zeros((num_rows, *values.shape[1:]))
    grown[: len(values)] = values
    return grown


def _read_lists(adjustment: Adjustment, row: int) -> _Lists:
    ids_E, bias_E = _ids(adjustment.bias_ids), np.array(adjustment.bias, dtype=np.float32)
    only_listed = len(adjustment.allowed_ids) > 0
    if only_listed:
        bias = dict(zip(ids_E.tolist(), bias_E.tolist(), strict=True))
        ids_E = np.unique(_ids(adjustment.allowed_ids))
        bias_E = np.array([bias.get(id, 0.0) for id in ids_E.tolist()], dtype=np.float32)
    # Lists, not arrays: hundreds of words of a few tokens each are read before the step that they come with.
    ends, bad_words = _ids(adjustment.end_ids).tolist(), [word.tolist() for word in adjustment.bad_words]
    ensure(all(len(word) <= MAX_BAD_WORD for word in bad_words), f"a bad word has over {MAX_BAD_WORD} tokens")
    until = [adjustment.min_tokens] * len(ends) + [_ALWAYS] * len(bad_words)
    any_before = [_ANY] * _HISTORY
    after = [any_before] * len(ends) + [[*any_before, *word[:-1]][-_HISTORY:] for word in bad_words]
    return _Lists(
        row=row,
        ids_E=ids_E,
        bias_E=bias_E,
        only_listed=only_listed,
        closed_C=np.array(ends + [word[-1] for word in bad_words], dtype=np.int64),
        until_C=np.array(until, dtype=np.int64),
        after_CH=np.array(after, dtype=np.int64).reshape(-1, _HISTORY),
    )


def _ids(words: memoryview | Sequence[int]) -> Ints:
    ids: Ints = np.asarray(words).astype(np.int64).reshape(-1)
    return ids
