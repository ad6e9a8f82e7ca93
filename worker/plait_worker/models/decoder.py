"""Decoder-only models: blocks between an embedding and a head.

Shapes: T tokens of the step, S rows that sample, D the hidden size, V the vocabulary, U a rank's shard of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from plait_worker.attention.backend import SlotMappedStep, StepAttention
from plait_worker.attention.mha.cpu_mha import CpuMhaStep
from plait_worker.attention.spec import AttentionSpec, distinct
from plait_worker.cache import CacheSpec, KVCache
from plait_worker.layers.norm import BlockNorm
from plait_worker.layers.rope import Rope
from plait_worker.layers.vocab import VocabEmbedding, VocabHead
from plait_worker.model_config import ModelConfig
from plait_worker.models.block import BlockReader, PreparedT, Step
from plait_worker.models.cpu_stack import read_cpu_stack
from plait_worker.models.fused import read_fused
from plait_worker.models.with_vocab_head import WithVocabHead
from plait_worker.parallel import Parallel
from plait_worker.rank_sums import Summand
from plait_worker.rows import Rows
from plait_worker.weights.reader import Weights

StepT = TypeVar("StepT")
"""What a backend prepares."""


class Decoder(WithVocabHead, Generic[PreparedT]):
    """``plait_worker.models.model.Model`` of any decoder-only family."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        parallel: Parallel,
        attention_specs: Sequence[AttentionSpec],
        read_block: BlockReader[PreparedT],
    ) -> None:
        """Read the whole model; one of ``attention_specs`` for each layer."""
        self.config = config
        self.attention_specs = attention_specs
        kinds = zip(config.layer_kinds, attention_specs, strict=True)
        self.cache_specs = [CacheSpec(kind.cache, spec) for kind, spec in kinds]
        known = distinct(attention_specs)
        shared = [(known.index(spec), spec.scales) for spec in attention_specs]
        self._step_kinds = list(dict.fromkeys(shared))
        self._step_index = [self._step_kinds.index(kind) for kind in shared]
        self.dtype = weights.dtype
        self.parallel = parallel
        below = weights.with_prefix("model")
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = VocabEmbedding(below, "embed_tokens", shape, parallel)
        self.blocks = [
            read_block(config, layer, below.with_prefix(f"layers.{layer}"), parallel)
            for layer in range(config.num_layers)
        ]
        self.norm = BlockNorm(below, "norm", config, parallel)
        self.head = (
            VocabHead.read(below, "embed_tokens", shape, parallel, self.embedding)
            if config.tie_embeddings
            else VocabHead.read(weights, "lm_head", shape, parallel)
        )
        self.rope = Rope(config.rope, config.head_dim, weights.device)
        self.weight_bytes = weights.held.num_bytes
        self.quantised_types = frozenset(weights.held.quantised_types)

    @torch.inference_mode()
    def forward(self, rows: Rows, cache: KVCache, attention: Sequence[PreparedT]) -> Tensor:
        """Hidden states after the final norm, ``[T, D]``."""
        steps = self.steps(rows, attention)
        embedded_TD = self.embedding(rows.token_ids_T)
        residual_TD = torch.zeros_like(embedded_TD)
        x_TD: Summand = embedded_TD
        for block, pages, step in zip(self.blocks, cache.layers, steps, strict=True):
            x_TD, residual_TD = block(x_TD, residual_TD, step, pages)
        return self.norm.add(x_TD, residual_TD)[0]

    def steps(self, rows: Rows, attention: Sequence[StepT]) -> list[Step[StepT]]:
        """For each layer; layers with one attention spec and the same scales share theirs."""
        tables = self.rope.tables(rows.positions_T)
        of_kind = [Step(*tables, attention[spec], scales) for spec, scales in self._step_kinds]
        return [of_kind[kind] for kind in self._step_index]


class MhaDecoder(Decoder[StepAttention]):
    """``plait_worker.models.model.Model`` of the families with MHA or GQA."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        parallel: Parallel,
        attention_specs: Sequence[AttentionSpec],
        read_block: BlockReader[StepAttention],
    ) -> None:
        """See ``Decoder``."""
        super().__init__(config, weights, parallel, attention_specs, read_block)
        self.stack = read_cpu_stack(self.blocks, self.norm, parallel)
        self.fused = read_fused(self.blocks, self.norm)

    @torch.inference_mode()
    def forward(self, rows: Rows, cache: KVCache, attention: Sequence[StepAttention]) -> Tensor:
        """Hidden states after the final norm, ``[T, D]``; by fewer kernels if they take the blocks and the step.

        They take a step whose layers share one attention spec.
        """
        step = attention[0] if len(attention) == 1 else None
        if self.stack is not None and isinstance(step, CpuMhaStep):
            tables = self.rope.tables(rows.positions_T)
            return self.stack.forward(self.embedding(rows.token_ids_T), *tables, step, cache)
        if self.fused is not None and isinstance(step, SlotMappedStep):
            steps = self.steps(rows, [step])
            return self.fused.forward(self.embedding(rows.token_ids_T), steps, cache)
        return super().forward(rows, cache, attention)


def mha_model(read_block: BlockReader[StepAttention]) -> Callable[..., MhaDecoder]:
    """Reads a model of these blocks, for a ``FamilySpec``."""
    return partial(MhaDecoder, read_block=read_block)
