"""Whole steps captured as CUDA graphs: forward and head for so many prompt tokens and so many decode rows.

A graph's only input is one array of integers; tables and last tokens it reads from the device's own. What fills
a step up belongs to the dummy slot. Where every row takes its best token, a second small graph picks them and keeps
them as the slots' last. Larger steps are launched operation by operation, hidden behind the device.

Shapes: of a graph, T = C + D tokens: C prompt tokens in P rows, the last of which is never used, then D decode rows;
R = P + D rows; V vocabulary. Small letters are what a step has of each.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from plait_kernels.sampling import pick_greedy
from plait_proto import ExitCode
from torch import Tensor

from plait_worker.batch import check_tokens, positions, without_lookaheads
from plait_worker.delta import Delta, Ints
from plait_worker.failure import Failure
from plait_worker.rows import DeviceLengths, Rows
from plait_worker.slots import Slots
from plait_worker.transfer import upload

_log = logging.getLogger(__name__)

DECODE_ROWS = (1, 2, 4, 8, *range(16, 129, 16), *range(160, 257, 32), *range(320, 513, 64), *range(640, 1025, 128))
"""Rows of steps that only decode: padding costs at most a quarter, and little where a row costs much."""
MIXED_DECODE_ROWS = (16, 32, 64, 128, 192, 256, 384, 512)
TILE, TILES = 128, (*range(1, 9), *range(10, 17, 2))
"""Tokens of steps with prompts, of both kinds together: a product takes as long for a part of a tile as for all of it.

Above these the device takes longer than the host needs to launch one operation after the other.
"""
LEAST_PROMPT = 64
"""Prompt tokens of a mixed step that are worth a graph of their own."""
PROMPT_ROWS = 17
"""Prefill rows of a step with prompts, the unused one included."""

Pool = Any
"""torch's handle of a pool of memory, whose type it keeps to itself."""
Compute = Callable[[Rows, Tensor], None]
"""Forward of a step, and head of the rows that sample, written to ``[R, V]``; may use the device's tensors alone."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a graph has room for."""

    prompt_tokens: int
    """C."""
    prompt_rows: int
    """P."""
    decode_rows: int
    """D."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.prompt_tokens + self.decode_rows

    @property
    def num_rows(self) -> int:
        """R."""
        return self.prompt_rows + self.decode_rows

    def fits(self, delta: Delta) -> bool:
        """Whether a step has room in it."""
        num_decode = len(delta.slots_R) - delta.num_prefill
        return (
            num_decode <= self.decode_rows
            and delta.num_tokens - num_decode <= self.prompt_tokens
            and delta.num_prefill < max(self.prompt_rows, 1)
        )


def sizes(max_rows: int, max_tokens: int) -> list[Size]:
    """Graphs for up to ``max_rows`` decode rows and steps of ``max_tokens`` tokens, smallest first."""
    decode = [Size(0, 0, rows) for rows in _up_to(DECODE_ROWS, max_rows)]
    mixed = [
        Size(tiles * TILE - rows, PROMPT_ROWS, rows)
        for tiles, rows in itertools.product(TILES, (0, *_up_to(MIXED_DECODE_ROWS, max_rows)))
        if tiles * TILE - rows >= LEAST_PROMPT and tiles * TILE <= max_tokens
    ]
    return sorted(decode + mixed, key=lambda size: size.num_tokens)


def _up_to(steps: Sequence[int], largest: int) -> Iterator[int]:
    """The steps below ``largest``, then it, where they reach so far."""
    yield from (step for step in steps if step < largest)
    if largest <= steps[-1]:
        yield largest


class GraphInputs:
    """The integers that a replay reads, side by side in one tensor."""

    def __init__(self, size: Size, slots: Slots) -> None:
        prompt, rows = size.prompt_tokens, size.num_rows
        ends = size.prompt_rows + 1
        self.widths = [prompt, size.num_tokens, size.num_tokens, rows, rows, rows, ends, ends, size.prompt_rows]
        self.size = size
        self.dummy_slot = slots.dummy_slot
        self.values = torch.zeros(sum(self.widths), dtype=torch.int64, device=slots.device)
        self.fill(None)

    def fill(self, delta: Delta | None) -> None:
        """Write a step's integers; without one all rows are the dummy slot's."""
        values = np.zeros(self.values.shape[0], dtype=np.int64)
        tokens, places, row_of, slots, sampling, picked, ends_q, ends_kv, kv = np.split(
            values, np.cumsum(self.widths[:-1])
        )
        size = self.size
        row_of[: size.prompt_tokens] = max(size.prompt_rows - 1, 0)
        row_of[size.prompt_tokens :] = np.arange(size.prompt_rows, size.num_rows)
        slots[:] = picked[:] = self.dummy_slot
        if delta is not None:
            num_prefill, num_decode = delta.num_prefill, len(delta.slots_R) - delta.num_prefill
            num_prompt = delta.num_tokens - num_decode
            ends_R = delta.lengths_R.cumsum()
            at_R = _spread(num_prefill, num_decode, size.prompt_rows)
            at_t = _spread(num_prompt, num_decode, size.prompt_tokens)
            tokens[:num_prompt] = without_lookaheads(delta)
            places[at_t] = positions(delta, ends_R)
            row_of[:num_prompt] = np.arange(num_prefill).repeat(delta.lengths_R[:num_prefill])
            slots[at_R] = delta.slots_R
            last_s = at_t[ends_R[delta.samples_R] - 1]
            sampling[: len(last_s)] = last_s
            picked[: len(last_s)] = delta.slots_R[delta.samples_R]
            kv[:num_prefill] = (delta.starts_R + delta.lengths_R)[:num_prefill]
            ends_q[1:] = num_prompt
            ends_q[1 : num_prefill + 1] = ends_R[:num_prefill]
            ends_kv[1:] = kv.cumsum()
        self.values.copy_(upload(values, self.values.device))

    @property
    def picked_slots(self) -> Tensor:
        """int64 ``[R]``: slots of the rows that sample, in the order of their logits; then the dummy slot."""
        picked: Tensor = self.values.split(self.widths)[5]
        return picked

    def rows(self, slots: Slots) -> Rows:
        """The step over these integers, as the model sees it."""
        size = self.size
        tokens, places, row_of, of_rows, sampling, _, ends_q, ends_kv, kv = self.values.split(self.widths)
        last = slots.last_tokens(of_rows[size.prompt_rows :])
        lengths = DeviceLengths(
            ends_q.to(torch.int32),
            ends_kv.to(torch.int32),
            kv.to(torch.int32),
            row_of,
            size.prompt_tokens,
            slots.max_tokens,
        )
        return Rows(
            num_prefill=size.prompt_rows,
            slots=[],
            starts=[],
            lengths=[size.prompt_tokens, *[0] * (size.prompt_rows - 1)][: size.prompt_rows] + [1] * size.decode_rows,
            token_ids_T=torch.cat((tokens, last)),
            positions_T=places,
            page_table_RW=slots.page_table(of_rows, slots.max_tokens),
            sample_index_S=sampling,
            device_lengths=lengths if size.prompt_rows else None,
        )


def _spread(num_first: int, num_second: int, begin_second: int) -> Ints:
    """Where the first and the second kind lie when the second begins at a fixed place."""
    return np.concatenate((np.arange(num_first), begin_second + np.arange(num_second)))


class StepGraph:
    """The graph of one size."""

    def __init__(self, size: Size, slots: Slots, compute: Compute, logits: Tensor, pool: Pool) -> None:
        """Capture ``compute`` over rows of the dummy slot, and the picking of best tokens.

        Each runs once before, which compiles what it needs.
        """
        self.size = size
        self._inputs = GraphInputs(size, slots)
        self._vocab = logits.shape[1]
        self._logits_RV = logits[: size.num_rows]
        compute(self._inputs.rows(slots), self._logits_RV)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            compute(self._inputs.rows(slots), self._logits_RV)
        self._pick(slots)
        self._picking = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._picking, pool=pool):
            self._ids_R = self._pick(slots)

    def replay(self, delta: Delta) -> Tensor:
        """``[s, V]`` of the rows that sample, until the next replay of any graph.

        Raises ``Failure`` where a token id lies outside the vocabulary.
        """
        check_tokens(delta, self._vocab)
        self._inputs.fill(delta)
        self._graph.replay()
        return self._logits_RV[: int(delta.samples_R.sum())]

    def pick(self, num: int) -> Tensor:
        """int32 ``[s]``: behind ``replay``, the best tokens of its logits, kept as the slots' last ones.

        They stay until the next replay of any graph.
        """
        self._picking.replay()
        return self._ids_R[:num]

    def _pick(self, slots: Slots) -> Tensor:
        ids_R = pick_greedy(self._logits_RV)
        slots.keep_tokens(self._inputs.picked_slots, ids_R)
        return ids_R.to(torch.int32)


PromptsFit = Callable[[Sequence[int], Sequence[int]], bool]
"""Whether prefill rows with these starts and lengths may be part of a captured step."""


def all_fit(_starts: Sequence[int], _lengths: Sequence[int]) -> bool:
    """Where graphs take any that there is room for."""
    return True


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """Graphs, smallest first; none by default."""

    graphs: Sequence[StepGraph] = ()
    prompts_fit: PromptsFit = all_fit

    def fitting(self, delta: Delta, slots: Slots) -> StepGraph | None:
        """The smallest graph for the step; None where it is too large, or wants what graphs do not give."""
        prompts = delta.slots_R[: delta.num_prefill]
        if not delta.samples_R.any() or any(slots.sampling.num_prompt_logprobs[slot] is not None for slot in prompts):
            return None
        num = delta.num_prefill
        if num and not self.prompts_fit(delta.starts_R[:num].tolist(), delta.lengths_R[:num].tolist()):
            return None
        return next((graph for graph in self.graphs if graph.size.fits(delta)), None)

    def of_decode_rows(self, num_rows: int) -> StepGraph:
        """The graph that a group's verdict names. Raises ``Failure`` where this rank has none of that size."""
        wanted = Size(0, 0, num_rows)
        graph = next((graph for graph in self.graphs if graph.size == wanted), None)
        if graph is None:
            raise Failure(
                ExitCode.SETTINGS,
                f"the group runs a graph of {num_rows} decode rows and this rank captured none of that size; "
                "name the sizes that every rank captures to all engines of the group",
            )
        return graph


@torch.inference_mode()
def capture(
    wanted: Sequence[Size], slots: Slots, compute: Compute, logits: Tensor, prompts_fit: PromptsFit
) -> StepGraphs:
    """Graphs of these sizes, which share one pool of memory and the tensor for their logits."""
    began = time.perf_counter()
    free_before, _ = torch.cuda.mem_get_info(slots.device)
    pool = torch.cuda.graph_pool_handle()
    graphs = [StepGraph(size, slots, compute, logits, pool) for size in reversed(wanted)]
    free_after, _ = torch.cuda.mem_get_info(slots.device)
    seconds, megabytes = time.perf_counter() - began, (free_before - free_after) / 1e6
    _log.info("%d CUDA graphs: %.1f s, %.0f MB", len(graphs), seconds, megabytes)
    return StepGraphs(graphs[::-1], prompts_fit)
