"""How a model may lie on the GPUs, and what memory that leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from plait.errors import SettingsError
from plait.gpu_sizes import ACTIVATION_BYTES, MEMORY_FRACTION, BatchSizes, gpu_sizes, kv_copies
from plait.nodes.layout import Layout as NodeLayout
from plait.nodes.layout import plan_layout
from plait.plan.gpus import Gpu
from plait.plan.model import PlannedModel
from plait.plan.parts import EXPERTS, HeldPart, Part, hold, parts_of
from plait.plan.settings import PlanServerSettings

CONTEXT_BYTES = 1_100_000_000
"""Of a GPU's memory that is gone before the weights are loaded: the driver's, and the CUDA context."""
GRAPH_BYTES = 2 << 30
"""Reserved for CUDA graphs of few tokens, as by the worker's profile run."""
_MANY_TOKENS = 4096
"""Of a step whose graph takes as much as its activations besides, if the model's full steps are graphs."""
_LOGIT_BYTES = 10
"""Of a logit while it is sampled from: bfloat16, and float32 copies."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks of a replica, and replicas."""

    tp: int
    dp: int
    dp_attention: bool = False

    @property
    def flags(self) -> str:
        """On the command line."""
        words = [f"--tp {self.tp}"] * (self.tp > 1) + [f"--dp {self.dp}"] * (self.dp > 1)
        return " ".join(words + ["--dp-attention"] * self.dp_attention)

    def on_nodes(self, gpus_per_node: int) -> NodeLayout | None:
        """As `plait launch` lays it out on the fewest nodes; None if it does not."""
        num_gpus = self.tp * self.dp
        try:
            return plan_layout(
                num_nodes=-(-num_gpus // gpus_per_node),
                tp=self.tp,
                dp=self.dp,
                dp_attention=self.dp_attention,
                gpus_per_node=gpus_per_node,
            )
        except SettingsError:
            return None

    def spans_nodes(self, gpus_per_node: int) -> bool:
        """Whether a replica computes across the network."""
        nodes = self.on_nodes(gpus_per_node)
        return nodes is not None and nodes.computes_across_nodes

    def held(self, model: PlannedModel) -> tuple[HeldPart, ...]:
        """The model's matrices, as these ranks hold them."""
        return hold(parts_of(model), model.storage.form, self._ranks_of)

    def weight_bytes(self, model: PlannedModel) -> float:
        """Of one rank."""
        shares = self.tp * self.dp
        return sum(held.num_bytes / (shares if self._is_shared(held.part) else self.tp) for held in self.held(model))

    def widened(self, model: PlannedModel) -> list[str]:
        """Parts that fewer ranks would hold quantised, or more of them."""
        whole = Layout(1, 1).held(model)
        pairs = zip(whole, self.held(model), strict=True)
        return list(dict.fromkeys(own.part.name for one, own in pairs if own.quantised < one.quantised))

    def _is_shared(self, part: Part) -> bool:
        """Whether all replicas hold it together."""
        return self.dp_attention and part.name == EXPERTS

    def _ranks_of(self, part: Part) -> int:
        """That divide each of its matrices."""
        return 1 if self._is_shared(part) else self.tp


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one rank, in bytes, and what its replica caches."""

    weight_bytes: float
    step_bytes: float
    """Activations and graphs."""
    num_pages: int
    page_bytes: float
    page_size: int
    sizes: BatchSizes

    @property
    def kv_tokens(self) -> int:
        """Of a replica; 0 if the weights alone do not fit."""
        return self.num_pages * self.page_size

    def num_requests(self, num_tokens: int) -> int:
        """Of this many tokens each, that a replica holds at a time."""
        return self.num_pages // -(-num_tokens // self.page_size)


def layouts(model: PlannedModel, num_gpus: int, gpus_per_node: int) -> Iterator[Layout]:
    """All that use every GPU, on as few nodes as have so many."""
    for tp in (ranks for ranks in range(1, num_gpus + 1) if num_gpus % ranks == 0):
        layout = Layout(tp, num_gpus // tp)
        if model.takes(tp) and layout.on_nodes(gpus_per_node) is not None:
            yield layout
    shared = Layout(1, num_gpus, dp_attention=True)
    if num_gpus > 1 and model.takes(1, num_gpus, dp_attention=True) and shared.on_nodes(gpus_per_node) is not None:
        yield shared


def memory(model: PlannedModel, gpu: Gpu, layout: Layout, server: PlanServerSettings) -> Memory:
    """As the worker divides it at start."""
    sizes = batch_sizes(model, gpu, layout, server)
    free = gpu.memory_bytes - CONTEXT_BYTES
    weights, step = layout.weight_bytes(model), _step_bytes(model, gpu, sizes)
    page = model.kv_bytes_of_rank(layout.tp) * server.page_size / (2 if server.kv_cache_dtype == "fp8" else 1)
    pool = free * (server.memory_fraction or MEMORY_FRACTION) - weights - step
    return Memory(weights, step, max(0, int(pool / page)), page, server.page_size, sizes)


def batch_sizes(model: PlannedModel, gpu: Gpu, layout: Layout, server: PlanServerSettings) -> BatchSizes:
    """As given, or as serve chooses them."""
    fraction, copies = server.memory_fraction or MEMORY_FRACTION, kv_copies(model.config, layout.tp)
    held = msgspec.structs.replace(model.size, weight_bytes=layout.weight_bytes(model) * layout.tp)
    chosen = gpu_sizes(held, gpu.memory_bytes, layout.tp, fraction, copies)
    return BatchSizes(
        server.max_seqs or chosen.max_seqs, server.max_batch_tokens or chosen.max_batch_tokens, chosen.reason
    )


def _step_bytes(model: PlannedModel, gpu: Gpu, sizes: BatchSizes) -> float:
    activations = sizes.max_batch_tokens * model.size.hidden_size * ACTIVATION_BYTES
    logits = sizes.max_seqs * model.config["vocab_size"] * _LOGIT_BYTES
    is_captured = model.is_mla and gpu.is_hopper and sizes.max_batch_tokens >= _MANY_TOKENS
    return GRAPH_BYTES + float((activations + logits) * (1 + is_captured))
