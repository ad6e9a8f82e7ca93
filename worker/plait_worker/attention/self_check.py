"""The self-check at start: a backend is compared with torch on random rows, and timed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait_worker.attention.backend import AttentionBackend, BackendRequirements
from plait_worker.rows import Rows

_DECODE_ROWS = 64
_PAGES_PER_ROW = 16
_SHORT_PAGES = 3
"""Of a row with a short context: a step's time is then that of the kernel's start, not of its reads."""
NUM_PAGES = _DECODE_ROWS * _PAGES_PER_ROW
_REPEATS = 20


class SelfCheck(ABC):
    """One layer's cache with random contents; decode rows, prefill rows and short extends over it."""

    def __init__(self, requirements: BackendRequirements[Any], reference: AttentionBackend[Any]) -> None:
        """Rows of up to 16 scattered pages."""
        self.device, self.dtype = requirements.device, requirements.spec.dtype
        self.reference = reference
        context = _PAGES_PER_ROW * requirements.page_size
        starts = [context - 1 - row * requirements.page_size // 5 for row in range(_DECODE_ROWS)]
        self.decode = self._rows(0, starts, [1] * _DECODE_ROWS)
        short = _SHORT_PAGES * requirements.page_size
        self.short_decode = self._rows(
            0, [short - 1 - row % requirements.page_size for row in range(_DECODE_ROWS)], [1] * _DECODE_ROWS
        )
        self.lone_decode = self._rows(0, [context - 1], [1])
        self.prefill = self._rows(4, [0, context // 2, 7, 0], [context, context // 2, context // 4, 1])
        # Short extends, which MLA absorbs; shorter if the pages are small. They have more tokens than an H200 has
        # multiprocessors, as kernels take other tiles for so many rows.
        half, rest = context // 2, context - context // 4
        extended = [1, 2, min(40, half), min(60, rest), min(40, half)]
        self.extends = self._rows(5, [0, 7, half, context // 4, 0], extended)

    @staticmethod
    def num_tokens(page_size: int) -> int:
        """At least the tokens of its largest step."""
        return 2 * _PAGES_PER_ROW * page_size + _DECODE_ROWS

    @abstractmethod
    def _attend(self, backend: AttentionBackend[Any], rows: Rows) -> Callable[[], Tensor]:
        """The step of these rows, with the same inputs for every backend."""

    def error(self, backend: AttentionBackend[Any], rows: Rows) -> float:
        """Largest difference from the reference, over the reference's largest value; NaN if the output has one."""
        given = self._attend(backend, rows)().double()
        right = self._attend(self.reference, rows)().double()
        return float((given - right).abs().max() / right.abs().max())

    def time_us(self, backend: AttentionBackend[Any], rows: Rows) -> float:
        """Device time of one layer in microseconds, without launches."""
        run = self._attend(backend, rows)
        run()  # what is made once a step is not a layer's time
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_REPEATS):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / _REPEATS * 1000

    def random(self, *size: int, generator: torch.Generator | None = None) -> Tensor:
        """Of the normal distribution, in the model's type."""
        return torch.randn(*size, dtype=self.dtype, device=self.device, generator=generator)

    def _rows(self, num_prefill: int, starts: list[int], lengths: list[int]) -> Rows:
        scattered = torch.randperm(NUM_PAGES, device=self.device)[: _PAGES_PER_ROW * len(starts)]
        positions = [torch.arange(s, s + n, device=self.device) for s, n in zip(starts, lengths, strict=True)]
        return Rows(
            num_prefill=num_prefill,
            slots=list(range(len(starts))),
            starts=starts,
            lengths=lengths,
            token_ids_T=torch.zeros(sum(lengths), dtype=torch.int64, device=self.device),
            positions_T=torch.cat(positions),
            page_table_RW=scattered.view(-1, _PAGES_PER_ROW).to(torch.int32),
            sample_index_S=torch.zeros(0, dtype=torch.int64, device=self.device),
        )
