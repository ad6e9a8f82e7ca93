"""How a model may lie on the GPUs, and what memory that leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plait.batch_sizes import ACTIVATION_BYTES, MEMORY_FRACTION, BatchSizes, gpu_sizes, kv_copies
from plait.plan.gpus import Gpu
from plait.plan.model import PlannedModel
from plait.plan.settings import PlanServerSettings

CONTEXT_BYTES = 1_100_000_000
"""Of a GPU's memory that is gone before the weights are loaded: the driver's, and the CUDA context."""
GRAPH_BYTES = 2 << 30
"""Reserved for CUDA graphs; the worker's profile run has the same."""
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

    def weight_bytes(self, model: PlannedModel) -> float:
        """Of one rank."""
        if not self.dp_attention:
            return model.size.weight_bytes / self.tp
        copied = model.size.weight_bytes - model.expert_bytes
        return copied / self.tp + model.expert_bytes / (self.tp * self.dp)


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


def layouts(model: PlannedModel, num_gpus: int) -> Iterator[Layout]:
    """All that use every GPU."""
    for tp in (ranks for ranks in range(1, num_gpus + 1) if num_gpus % ranks == 0):
        if model.divides(tp):
            yield Layout(tp, num_gpus // tp)
    if model.is_mla and 1 < num_gpus <= model.num_experts:
        yield Layout(1, num_gpus, dp_attention=True)


def memory(model: PlannedModel, gpu: Gpu, layout: Layout, server: PlanServerSettings) -> Memory:
    """As the worker divides it at start."""
    sizes = batch_sizes(model, gpu, layout, server)
    free = gpu.memory_bytes - CONTEXT_BYTES
    weights, step = layout.weight_bytes(model), _step_bytes(model, sizes)
    page = model.kv_bytes_of_rank(layout.tp) * server.page_size / (2 if server.kv_cache_dtype == "fp8" else 1)
    pool = free * (server.memory_fraction or MEMORY_FRACTION) - weights - step
    return Memory(weights, step, max(0, int(pool / page)), page, server.page_size, sizes)


def batch_sizes(model: PlannedModel, gpu: Gpu, layout: Layout, server: PlanServerSettings) -> BatchSizes:
    """As given, or as serve chooses them."""
    fraction, copies = server.memory_fraction or MEMORY_FRACTION, kv_copies(model.config, layout.tp)
    chosen = gpu_sizes(model.size, gpu.memory_bytes, layout.tp, fraction, copies)
    return BatchSizes(
        server.max_seqs or chosen.max_seqs, server.max_batch_tokens or chosen.max_batch_tokens, chosen.reason
    )


def _step_bytes(model: PlannedModel, sizes: BatchSizes) -> float:
    activations = sizes.max_batch_tokens * model.size.hidden_size * ACTIVATION_BYTES
    return GRAPH_BYTES + activations + float(sizes.max_seqs * model.config["vocab_size"] * _LOGIT_BYTES)
