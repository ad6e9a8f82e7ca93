"""The logits of a model: what every family does alike behind its last norm.

Shapes: S rows that sample, D the hidden size, V the vocabulary, U a rank's shard of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait_worker.layers.vocab import VocabHead


class WithVocabHead:
    """The part of ``plait_worker.models.model.Model`` that its head answers."""

    head: VocabHead

    @torch.inference_mode()
    def logits(self, hidden_SD: Tensor) -> Tensor:
        """float32 ``[S, V]``."""
        return self.head(hidden_SD)

    @torch.inference_mode()
    def shard_logits(self, hidden_SD: Tensor, out_SU: Tensor | None = None) -> Tensor:
        """See ``VocabHead.shard``."""
        return self.head.shard(hidden_SD, out_SU)

    @torch.inference_mode()
    def whole_logits(self, logits_SU: Tensor) -> Tensor:
        """See ``VocabHead.whole``."""
        return self.head.whole(logits_SU)

    @torch.inference_mode()
    def own_rows_of_logits(self, logits_SU: Tensor) -> Tensor:
        """See ``VocabHead.own_rows``."""
        return self.head.own_rows(logits_SU)

    @torch.inference_mode()
    def greedy_ids(self, logits_SU: Tensor) -> Tensor:
        """See ``VocabHead.greedy``."""
        return self.head.greedy(logits_SU)
