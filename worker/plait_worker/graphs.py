"""Steps captured as CUDA graphs: forward and head, for a number of prompt tokens and of decode rows.

A graph reads one array of integers, and what attention plans before a replay. Page tables and last tokens are on the
device. Padding belongs to the dummy slot. For greedy sampling a second graph takes the argmax and keeps it as the
slots' last token. Larger steps are launched kernel by kernel: the device is busy for longer than the launches take.

Shapes: as in ``plait_worker.graph_sizes``; V vocabulary, U a rank's shard of it. Small letters are a step's own counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from plait_proto import ExitCode
from torch import Tensor

from plait_worker.attention.backend import CapturedPrefill, UnplannedPrefill
from plait_worker.batch import check_tokens
from plait_worker.errors import WorkerError
from plait_worker.graph_inputs import GraphInputs
from plait_worker.graph_sizes import GraphSize, needed_size
from plait_worker.rows import Rows
from plait_worker.slots import Slots
from plait_worker.step_inputs import StepInputs

_log = logging.getLogger(__name__)

Pool = Any
"""torch's handle of a memory pool; its type is private."""
Compute = Callable[[Rows, Tensor], None]
"""Forward of a step and head of the rows that sample, written to ``[R, U]``. It may read only the device's tensors."""


@dataclass(frozen=True, slots=True)
class Captured:
    """What all graphs of a rank share."""

    slots: Slots
    compute: Compute
    greedy: Callable[[Tensor], Tensor]
    """The ids of the largest logits, from ``[R, U]``."""
    logits_RU: Tensor
    """Of the largest R."""
    vocab_size: int
    prompts: CapturedPrefill


class StepGraph:
    """The graph of one size."""

    def __init__(self, size: GraphSize, shared: Captured, pool: Pool) -> None:
        """Capture forward and head over rows of the dummy slot, and greedy sampling.

        Each runs once before its capture, which compiles its kernels.
        """
        slots, compute = shared.slots, shared.compute
        self.size = size
        self._prompts = shared.prompts
        self._inputs = GraphInputs(size, slots)
        self._vocab = shared.vocab_size
        self._greedy = shared.greedy
        self._logits_RU = shared.logits_RU[: size.num_rows]
        self._prompts.plan(size, [], [])
        compute(self._inputs.rows(slots), self._logits_RU)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            compute(self._inputs.rows(slots), self._logits_RU)
        self._sample(slots)
        self._sampling_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._sampling_graph, pool=pool):
            self._ids_R = self._sample(slots)

    def replay(self, inputs: StepInputs) -> Tensor:
        """``[s, U]`` of the rows that sample, until the next replay of any graph.

        Raises ``WorkerError`` if a token id lies outside the vocabulary.
        """
        check_tokens(inputs, self._vocab)
        self._inputs.fill(inputs)
        self._prompts.plan(self.size, *_prompts(inputs))
        self._graph.replay()
        return self._logits_RU[: int(inputs.samples_R.sum())]

    def sample(self, num: int) -> Tensor:
        """int32 ``[s]``: after ``replay``, the argmax of its logits, kept as the slots' last tokens.

        They stay until the next replay of any graph.
        """
        self._sampling_graph.replay()
        return self._ids_R[:num]

    def _sample(self, slots: Slots) -> Tensor:
        ids_R = self._greedy(self._logits_RU)
        slots.keep_tokens(self._inputs.sampled_slots, ids_R)
        return ids_R.to(torch.int32)


def _prompts(inputs: StepInputs) -> tuple[list[int], list[int]]:
    """Starts and lengths of the prefill rows."""
    num = inputs.num_prefill
    return inputs.starts_R[:num].tolist(), inputs.lengths_R[:num].tolist()


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """Graphs, smallest first; none by default."""

    graphs: Sequence[StepGraph] = ()
    prompts: CapturedPrefill = field(default_factory=UnplannedPrefill)

    def find_graph(self, inputs: StepInputs, slots: Slots) -> StepGraph | None:
        """The best graph for the step; None if it is too large, or needs hidden states of prompts or no sample."""
        prompts = inputs.slots_R[: inputs.num_prefill]
        if slots.pooled.has_rows(inputs):
            return None
        if not inputs.samples_R.any() or any(slots.sampling.num_prompt_logprobs[slot] is not None for slot in prompts):
            return None
        needed = needed_size(inputs)
        if inputs.num_prefill == 0:
            return next((graph for graph in self.graphs if graph.size.fits(needed)), None)
        roomy = {graph.size: graph for graph in self.graphs if graph.size.fits(needed)}
        size = self.prompts.choose(list(roomy), *_prompts(inputs))
        return None if size is None else roomy[size]

    def of_tokens(self, num_tokens: int, inputs: StepInputs) -> StepGraph:
        """The best graph for the step of those with as many tokens, which a group's decision names.

        Raises ``WorkerError`` if no graph of this rank has that size and holds the step.
        """
        needed = needed_size(inputs)
        roomy = {
            graph.size: graph
            for graph in self.graphs
            if graph.size.num_tokens == num_tokens and graph.size.holds(needed)
        }
        if not roomy:
            raise WorkerError(
                ExitCode.SETTINGS,
                f"the group runs a graph of {num_tokens} tokens and this rank captured none that holds {needed}; "
                "name the sizes that every rank captures to all engines of the group",
            )
        chosen = self.prompts.choose(list(roomy), *_prompts(inputs)) if inputs.num_prefill else None
        return roomy[chosen or min(roomy, key=lambda size: size.context_tokens or -1)]


@torch.inference_mode()
def capture(wanted: Sequence[GraphSize], shared: Captured) -> StepGraphs:
    """Graphs of these sizes, in one memory pool."""
    began, device = time.perf_counter(), shared.slots.device
    free_before, _ = torch.cuda.mem_get_info(device)
    pool = torch.cuda.graph_pool_handle()
    graphs = [StepGraph(size, shared, pool) for size in reversed(wanted)]
    free_after, _ = torch.cuda.mem_get_info(device)
    seconds, megabytes = time.perf_counter() - began, (free_before - free_after) / 1e6
    _log.info("%d CUDA graphs: %.1f s, %.0f MB", len(graphs), seconds, megabytes)
    return StepGraphs(graphs[::-1], shared.prompts)
