"""Masks of a step's rows: which tokens each may sample. They come while the device computes the step's forward.

Shapes: S rows that sample, M masks, W words of a mask, N new masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from plait_kernels.sampling import mask_logits
from plait_kernels.sampling.mask import WORD_BITS
from plait_proto import StepMasks
from torch import Tensor

from plait_worker.errors import ensure
from plait_worker.step_inputs import Bools, Ints
from plait_worker.transfer import upload

MAX_MASKS = 1 << 16
"""Numbers of masks; the engine reuses them long before."""
_FEWEST_MASKS = 16
_FREE = -1
"""Of a row that may sample any token."""


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The masks of rows that sample."""

    masks_MW: Tensor
    """int32, on the device."""
    mask_S: Ints
    """Row of the masks, or ``_FREE``."""

    @property
    def is_masked_S(self) -> Bools:
        """Rows that may not sample every token."""
        is_masked_S: Bools = self.mask_S != _FREE
        return is_masked_S

    def of_rows(self, rows: slice | Ints) -> RowMasks:
        """Those of some of the rows."""
        return RowMasks(self.masks_MW, self.mask_S[rows])

    def apply(self, logits_SV: Tensor) -> Tensor:
        """New logits of these rows, which all have masks."""
        return mask_logits(logits_SV, self.masks_MW, upload(self.mask_S, logits_SV.device))


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What a step's masks say of the rows that sample."""

    left_out_S: Bools
    """Rows that sample nothing."""
    masks: RowMasks

    def is_free(self) -> bool:
        """Whether every row samples any token."""
        return not self.left_out_S.any() and not self.masks.is_masked_S.any()


class MaskTable:
    """Masks on the device, each under its number until another one gets that number."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Nothing is allocated until a mask comes."""
        self._num_words = -(-vocab_size // WORD_BITS)
        self._device = device
        self._is_known_M = np.zeros(0, dtype=np.bool_)
        self._masks_MW = torch.zeros((0, self._num_words), dtype=torch.int32, device=device)

    def read(self, messages: Sequence[StepMasks], num_rows: int) -> SampledRows:
        """Keep the new masks, and say what each of the step's sampling rows may sample.

        Raises ``WorkerError`` if a row or a mask is named that is not there.
        """
        left_out_S, mask_S = np.zeros(num_rows, dtype=np.bool_), np.full(num_rows, _FREE, dtype=np.int64)
        for message in messages:
            self._put(message)
            left_out, masked_K3 = _words(message.left_out), _words(message.masked).reshape(-1, 3)
            for rows in (left_out, masked_K3[:, 0]):
                ensure(len(rows) == 0 or int(rows.max()) < num_rows, f"the masks name a row beyond the {num_rows}")
            ensure(not masked_K3[:, 1].any(), "the masks are for drafts, and this worker computes one token a row")
            self._check_known(masked_K3[:, 2])
            left_out_S[left_out] = True
            mask_S[masked_K3[:, 0]] = masked_K3[:, 2]
        return SampledRows(left_out_S, RowMasks(self._masks_MW, mask_S))

    def _put(self, message: StepMasks) -> None:
        words = np.frombuffer(message.new_masks, dtype="<u4")
        if len(words) == 0:
            return
        given = message.num_mask_words
        ensure(given == self._num_words, f"masks have {given} words; this vocabulary has {self._num_words}")
        records = words.reshape(-1, 1 + self._num_words)
        numbers_N = records[:, 0].astype(np.int64)
        ensure(int(numbers_N.max()) < MAX_MASKS, f"a mask has number {numbers_N.max()}; {MAX_MASKS} are allowed")
        self._grow(int(numbers_N.max()) + 1)
        self._is_known_M[numbers_N] = True
        masks_NW = records[:, 1:].astype(np.uint32).view(np.int32)  # the only copy: a row has 19 kB
        self._masks_MW[upload(numbers_N, self._device)] = upload(masks_NW, self._device)

    def _check_known(self, numbers: Ints) -> None:
        is_known = numbers < len(self._is_known_M)
        is_known[is_known] = self._is_known_M[numbers[is_known]]
        ensure(bool(is_known.all()), "a row has a mask that was never sent")

    def _grow(self, num_masks: int) -> None:
        old = len(self._masks_MW)
        if num_masks <= old:
            return
        new = max(_FEWEST_MASKS, 2 * old, num_masks)
        grown = self._masks_MW.new_zeros((new, self._num_words))
        grown[:old] = self._masks_MW
        self._masks_MW = grown
        self._is_known_M = np.concatenate((self._is_known_M, np.zeros(new - old, dtype=np.bool_)))


class MaskInbox:
    """Masks that came for steps which are not sampled yet."""

    def __init__(self) -> None:
        """Nothing has come."""
        self._of_steps: dict[int, list[StepMasks]] = {}

    def add(self, message: StepMasks) -> None:
        """A message has come."""
        self._of_steps.setdefault(message.step, []).append(message)

    def take(self, step: int) -> list[StepMasks] | None:
        """All masks of a step; None until the last message is here."""
        messages = self._of_steps.get(step)
        if messages is None or not messages[-1].is_last:
            return None
        return self._of_steps.pop(step)


def _words(frame: bytes | memoryview) -> NDArray[np.int64]:
    return np.frombuffer(frame, dtype="<u4").astype(np.int64)
