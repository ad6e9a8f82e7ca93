"""The interface of a loaded model.

Shapes: T tokens of a step, S rows that sample, D the hidden size, V the vocabulary, U a rank's shard of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from plait_worker.attention.spec import AttentionSpec
from plait_worker.cache import CacheSpec, KVCache
from plait_worker.model_config import ModelConfig
from plait_worker.rows import Rows

PreparedT_contra = TypeVar("PreparedT_contra", contravariant=True)


class Model(Protocol[PreparedT_contra]):
    """A loaded model on one rank; a step's attention is what its backends prepare."""

    @property
    def config(self) -> ModelConfig:
        """Of the whole model."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and cache."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights, in all forms that it holds."""
        ...

    @property
    def quantised_types(self) -> frozenset[str]:
        """Of the matrices that stay quantised."""
        ...

    @property
    def cache_specs(self) -> Sequence[CacheSpec]:
        """One for each layer on this rank."""
        ...

    @property
    def attention_specs(self) -> Sequence[AttentionSpec]:
        """One for each layer on this rank."""
        ...

    def forward(self, rows: Rows, cache: KVCache, attention: Sequence[PreparedT_contra]) -> Tensor:
        """Hidden states after the final norm, ``hidden_TD``; writes the step's keys and values into the cache.

        ``attention`` has what each distinct spec's backend prepared, in the order of ``spec.distinct``.
        """
        ...

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """float32 ``[S, V]`` over the whole vocabulary, for the rows that sample, at least one."""
        ...

    def shard_logits(self, hidden_SD: Tensor, out_SU: Tensor | None = None) -> Tensor:
        """This rank's shard of them, to sample from: on a GPU in the model's dtype; written to ``out_SU`` if given."""
        ...

    def whole_logits(self, logits_SU: Tensor) -> Tensor:
        """``[S, V]`` on every rank, from each one's shard."""
        ...

    def own_rows_of_logits(self, logits_SU: Tensor) -> Tensor:
        """``[C, V]`` of the rows that this rank samples, from each one's shard of all rows; zeros fill it up."""
        ...

    def greedy_ids(self, logits_SU: Tensor) -> Tensor:
        """The id of each row's largest logit of all ranks, the lowest of equals: int64 ``[S]`` on every rank."""
        ...
