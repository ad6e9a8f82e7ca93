"""DeepSeek-V4: residual streams, one attention of three kinds, experts chosen by score or by token id.

A token sees the last W raw keys, itself included, and compressed entries of what lies before: none in a dense layer,
those an indexer chooses in a CSA layer, all in an HCA layer.

Shapes: T tokens of a step, n streams, D the hidden size, H heads of this rank, E elements of a head, Q of the queries'
latent, I indexer heads, J elements of one, G output groups of this rank, R elements of a group's output, C channels of
the compressor, F rotated pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from plait_kernels.norm import rms_norm
from plait_proto import family
from torch import Tensor

from plait_worker.attention.compressed.row_lists import ChosenEntries, EntryLists, WindowLists
from plait_worker.attention.compressed.running_sums import close_blocks
from plait_worker.attention.compressed.torch_compressed import CompressedStep
from plait_worker.attention.spec import AttentionSpec, CompressedShape, distinct
from plait_worker.cache import CacheSpec, EntryPages, KVCache
from plait_worker.layers.limited_mlp import BiasRouter, HashRouter, LimitedExperts, LimitedMlp
from plait_worker.layers.linear import ColumnLinear, Projection, RowLinear
from plait_worker.layers.norm import RmsNorm
from plait_worker.layers.pair_rope import PairRope, rotate_last
from plait_worker.layers.streams import StreamHead, StreamMixer
from plait_worker.layers.vocab import VocabEmbedding, VocabHead
from plait_worker.model_config import CompressedConfig, ModelConfig, MoeConfig, StreamsConfig
from plait_worker.models.family import FamilySpec
from plait_worker.models.with_vocab_head import WithVocabHead
from plait_worker.parallel import Parallel
from plait_worker.rows import Rows
from plait_worker.slot_state import LayerState
from plait_worker.weights.deepseek_v4_config import read_deepseek_v4
from plait_worker.weights.deepseek_v4_files import DeepseekV4Files
from plait_worker.weights.json_config import ConfigSpec
from plait_worker.weights.reader import Weights

_WHOLE = Parallel()
"""Not sharded: keys, entries and the indexer are the same on every rank."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The parts of the configuration that every family-specific layer reads."""

    config: ModelConfig
    attention: CompressedConfig
    streams: StreamsConfig
    moe: MoeConfig

    @classmethod
    def of(cls, config: ModelConfig) -> Sizes:
        """Raises ``AssertionError`` for another family's."""
        attention, streams, moe = config.compressed, config.streams, config.moe
        if attention is None or streams is None or moe is None:
            raise AssertionError(f"{config.architecture} is not DeepSeek-V4")
        return cls(config, attention, streams, moe)


@dataclass(frozen=True, slots=True)
class LayerStep:
    """What a layer needs of a step."""

    token_ids_T: Tensor
    rotations_TF: Tensor
    """Of the tokens, by the layer's rope."""
    entry_rotations_CF: Tensor | None
    """Of the entries that the step completes; None in a dense layer."""
    window: WindowLists
    attention: CompressedStep


class Compressor:
    """From tokens to entries: a softmax over a block's tokens in each channel, then norm and rope.

    In a CSA layer an entry also takes in the block before its own, and has a key for the indexer, made the same way:
    the channels of both lie side by side, those for the next block's entry first.
    """

    def __init__(self, sizes: Sizes, shape: CompressedShape, weights: Weights) -> None:
        """Read ``compressor`` and, in a CSA layer, ``indexer.compressor``: all but what ``names`` has."""
        below = ["compressor", "indexer.compressor"] if shape.overlaps else ["compressor"]
        self.widths = [shape.head_dim, shape.index_dim][: len(below)]
        self.copies = 2 if shape.overlaps else 1
        self.projections = [
            Projection(f"{name}.{part}", self.copies * width)
            for part in ("wkv", "wgate")
            for name, width in zip(below, self.widths, strict=True)
        ]
        tables = [
            weights.take(f"{name}.ape", (shape.ratio, self.copies * width), dtype=torch.float32)
            for name, width in zip(below, self.widths, strict=True)
        ]
        self.ape = self._side_by_side(tables)
        self.norms = [
            RmsNorm(weights, f"{name}.norm", width, sizes.config.norm_eps)
            for name, width in zip(below, self.widths, strict=True)
        ]

    def __call__(self, projected: Sequence[Tensor], step: LayerStep, state: LayerState, pages: EntryPages) -> None:
        """Take in the step's tokens and store the entries that they complete."""
        blocks, num = step.attention.blocks, len(self.widths)
        values_TC, gates_TC = (self._side_by_side(part) for part in (projected[:num], projected[num:]))
        entries_CK = close_blocks(values_TC, gates_TC + self.ape[blocks.ape_T], blocks, state)
        if len(entries_CK):
            parts = zip(pages[:num], self.norms, entries_CK.split(self.widths, dim=1), strict=True)
            for pool, norm, part_CK in parts:
                finished_CK = self._finish(norm, part_CK, step.entry_rotations_CF).to(pool.dtype)
                pool.flatten(0, 1).index_copy_(0, blocks.place_C, finished_CK)

    def _finish(self, norm: RmsNorm, part_CK: Tensor, rotations_CF: Tensor | None) -> Tensor:
        if rotations_CF is None:
            raise AssertionError("a dense layer has no entries")
        return rotate_last(rms_norm(part_CK, norm.weight_D.float(), norm.eps)[:, None], rotations_CF)[:, 0]

    def _side_by_side(self, parts: Sequence[Tensor]) -> Tensor:
        """float32: the first halves of all parts, then the second."""
        halves = zip(*(part.float().chunk(self.copies, dim=1) for part in parts), strict=True)
        return torch.cat([half for copy in halves for half in copy], dim=1)


class Indexer:
    """Queries that score a CSA layer's entries; the scores' weights come with the other projections of ``x``."""

    def __init__(self, sizes: Sizes, weights: Weights) -> None:
        """Read ``indexer.wq_b``."""
        attention = sizes.attention
        self.index_dim = attention.index_dim
        queries = Projection("indexer.wq_b", attention.num_index_heads, attention.index_dim)
        self.queries = ColumnLinear(weights, (queries,), attention.q_rank, _WHOLE)

    def __call__(self, latent_TQ: Tensor, rotations_TF: Tensor) -> Tensor:
        """``[T, I, J]``."""
        return rotate_last(self.queries(latent_TQ).unflatten(1, (-1, self.index_dim)), rotations_TF)


class GroupedOutput:
    """The output projection: each group of heads by itself, then all together."""

    def __init__(self, sizes: Sizes, weights: Weights, parallel: Parallel) -> None:
        """Read this rank's groups of ``wo_a``, and ``wo_b``."""
        config, attention = sizes.config, sizes.attention
        groups = Projection("wo_a", attention.num_groups, attention.group_rank)
        num_inputs = config.num_heads * config.head_dim // attention.num_groups
        weight = groups.take(weights, "wo_a.weight", (groups.num_outputs, num_inputs), parallel)
        self.weight_GIR = weight.unflatten(0, (-1, attention.group_rank)).transpose(1, 2)
        self.both = RowLinear(weights, "wo_b", groups, config.hidden_size, parallel)

    def __call__(self, out_THE: Tensor) -> Tensor:
        """``[T, D]``, this rank's partial sum."""
        num_groups = len(self.weight_GIR)
        grouped_GTI = out_THE.reshape(len(out_THE), num_groups, -1).transpose(0, 1)
        return self.both(torch.bmm(grouped_GTI, self.weight_GIR).transpose(0, 1).flatten(1))


class Attention:
    """All three kinds: a dense layer has no compressor, and only a CSA layer an indexer."""

    def __init__(self, sizes: Sizes, shape: CompressedShape, weights: Weights, parallel: Parallel) -> None:
        """Read the tensors of ``attn``."""
        config, attention = sizes.config, sizes.attention
        self.head_dim, self.eps, self.parallel = config.head_dim, config.norm_eps, parallel
        self.compressor = Compressor(sizes, shape, weights) if shape.ratio else None
        self.indexer = Indexer(sizes, weights) if shape.overlaps else None
        first = [Projection("wq_a", attention.q_rank), Projection("wkv", config.head_dim)]
        first += self.compressor.projections if self.compressor else []
        first += [Projection("indexer.weights_proj", attention.num_index_heads)] if self.indexer else []
        self.widths = [each.num_outputs for each in first]
        self.first = ColumnLinear(weights, first, config.hidden_size, _WHOLE)
        self.q_norm = RmsNorm(weights, "q_norm", attention.q_rank, config.norm_eps)
        self.kv_norm = RmsNorm(weights, "kv_norm", config.head_dim, config.norm_eps)
        queries = Projection("wq_b", config.num_heads, config.head_dim)
        self.queries = ColumnLinear(weights, (queries,), attention.q_rank, parallel)
        heads = parallel.shard(config.num_heads)
        self.sinks_H = weights.take("attn_sink", (config.num_heads,), rows=heads, dtype=torch.float32)
        self.output = GroupedOutput(sizes, weights, parallel)

    def __call__(self, x_TD: Tensor, step: LayerStep, state: LayerState, pages: EntryPages) -> Tensor:
        """``[T, D]``. Entries are stored before anything reads them; rings are read before they are rewritten."""
        latent_TQ, key_TE, *others = self.first(x_TD).split(self.widths, dim=1)
        latent_TQ = self.q_norm(latent_TQ)
        q_THE = self.queries(latent_TQ).unflatten(1, (-1, self.head_dim))
        q_THE = rotate_last(rms_norm(q_THE, q_THE.new_ones(self.head_dim), self.eps), step.rotations_TF)
        state.raw[: len(x_TD)] = rotate_last(self.kv_norm(key_TE)[:, None], step.rotations_TF)[:, 0]
        seen: EntryLists | ChosenEntries | None = None
        if self.compressor is not None:
            self.compressor(others[: len(self.compressor.projections)], step, state, pages)
            seen = step.attention.entries
        if self.indexer is not None:
            seen = step.attention.choose(self.indexer(latent_TQ, step.rotations_TF), others[-1], pages.index_keys)
        out_THE = step.attention.attend(q_THE, state.raw, pages.entries, step.window, seen, self.sinks_H)
        state.keep_window(step.window)
        out_TD = self.output(rotate_last(out_THE, step.rotations_TF.conj()))
        return self.parallel.all_reduce(out_TD)


class Moe:
    """The chosen experts and the shared one."""

    def __init__(self, sizes: Sizes, layer: int, weights: Weights, parallel: Parallel) -> None:
        """Read the tensors of ``ffn``."""
        config, moe, self.parallel = sizes.config, sizes.moe, parallel
        limit = float("inf") if moe.limit is None else moe.limit
        self.router = (HashRouter if layer in moe.hash_layers else BiasRouter)(config, moe, weights)
        mlp = partial(LimitedMlp, config, parallel=parallel, limit=limit)
        below = (weights.with_prefix(f"experts.{expert}") for expert in range(moe.num_experts))
        self.experts = LimitedExperts([mlp(each, size=moe.intermediate_size) for each in below])
        shared = weights.with_prefix("shared_experts")
        self.shared = mlp(shared, size=moe.shared_size) if moe.shared_size else None

    def __call__(self, x_TD: Tensor, token_ids_T: Tensor) -> Tensor:
        """``[T, D]``."""
        out_TD = self.experts(x_TD, *self.router(x_TD, token_ids_T))
        if self.shared is not None:
            out_TD += self.shared(x_TD)
        return self.parallel.all_reduce(out_TD)


class Block:
    """Attention, then experts, each between the streams."""

    def __init__(self, sizes: Sizes, layer: int, shape: CompressedShape, weights: Weights, parallel: Parallel) -> None:
        """Read the tensors of ``layers.N``."""
        config = sizes.config
        self.attention_mixer = StreamMixer(config, sizes.streams, weights, "hc_attn")
        self.attention_norm = RmsNorm(weights, "attn_norm", config.hidden_size, config.norm_eps)
        self.attention = Attention(sizes, shape, weights.with_prefix("attn"), parallel)
        self.moe_mixer = StreamMixer(config, sizes.streams, weights, "hc_ffn")
        self.moe_norm = RmsNorm(weights, "ffn_norm", config.hidden_size, config.norm_eps)
        self.moe = Moe(sizes, layer, weights.with_prefix("ffn"), parallel)

    def __call__(self, streams_TnD: Tensor, step: LayerStep, state: LayerState, pages: EntryPages) -> Tensor:
        """The streams behind the block."""
        x_TD, mixing = self.attention_mixer(streams_TnD)
        streams_TnD = mixing.add(streams_TnD, self.attention(self.attention_norm(x_TD), step, state, pages))
        x_TD, mixing = self.moe_mixer(streams_TnD)
        return mixing.add(streams_TnD, self.moe(self.moe_norm(x_TD), step.token_ids_T))


class DeepseekV4(WithVocabHead):
    """``plait_worker.models.model.Model``."""

    def __init__(
        self, config: ModelConfig, weights: Weights, parallel: Parallel, attention_specs: Sequence[CompressedShape]
    ) -> None:
        """Read the whole model."""
        sizes = Sizes.of(config)
        self.config, self.dtype, self.parallel = config, weights.dtype, parallel
        self.num_streams = sizes.streams.num_streams
        self.attention_specs: Sequence[AttentionSpec] = attention_specs
        self.cache_specs = [CacheSpec("compressed", spec) for spec in attention_specs]
        known = distinct(attention_specs)
        self._spec_index = [known.index(spec) for spec in attention_specs]
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = VocabEmbedding(weights, "embed", shape, parallel)
        self.blocks = [
            Block(sizes, layer, spec, weights.with_prefix(f"layers.{layer}"), parallel)
            for layer, spec in enumerate(attention_specs)
        ]
        self.stream_head = StreamHead(config, sizes.streams, weights)
        self.norm = RmsNorm(weights, "norm", config.hidden_size, config.norm_eps)
        self.head = (
            VocabHead.read(weights, "embed", shape, parallel, self.embedding)
            if config.tie_embeddings
            else VocabHead.read(weights, "head", shape, parallel)
        )
        self.rope = PairRope(config.rope, sizes.attention.rope_dim, weights.device)
        self.entry_rope = PairRope(sizes.attention.entry_rope, sizes.attention.rope_dim, weights.device)
        self.weight_bytes = weights.held.num_bytes
        self.quantised_types = frozenset(weights.held.quantised_types)

    @torch.inference_mode()
    def forward(self, rows: Rows, cache: KVCache, attention: Sequence[CompressedStep]) -> Tensor:
        """Hidden states after the final norm, ``[T, D]``."""
        embedded_TD = self.parallel.all_reduce(self.embedding(rows.token_ids_T))
        streams_TnD = embedded_TD[:, None].expand(-1, self.num_streams, -1).contiguous()
        window = attention[0].window(cache.states[0].layout)
        steps = [self._layer_step(rows, each, window) for each in attention]
        layers = zip(self.blocks, self._spec_index, cache.states, cache.entry_pages, strict=True)
        for block, spec, state, pages in layers:
            streams_TnD = block(streams_TnD, steps[spec], state, pages)
        return self.norm(self.stream_head(streams_TnD))

    def _layer_step(self, rows: Rows, attention: CompressedStep, window: WindowLists) -> LayerStep:
        """For the layers of one ratio."""
        has_entries = attention.shape.ratio > 0
        rotations_TF = (self.entry_rope if has_entries else self.rope).rotations(rows.positions_T)
        of_entries = self.entry_rope.rotations(attention.blocks.first_C) if has_entries else None
        return LayerStep(rows.token_ids_T, rotations_TF, of_entries, window, attention)


FAMILY = FamilySpec(
    family("deepseek_v4"),
    ConfigSpec(read_whole=read_deepseek_v4),
    DeepseekV4,
    open_folder=DeepseekV4Files,
)
