"""A problem on which an attention backend is checked against the torch backend, and timed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plait_worker.attention import AttentionBackend, AttentionShape, StepAttention
from plait_worker.attention.torch import TorchAttention
from plait_worker.rows import Rows

_DECODE_ROWS = 64
_PAGES_PER_ROW = 16
_REPEATS = 20


class SmallProblem:
    """One layer's cache with random contents, rows that decode over it, and rows that prefill."""

    def __init__(self, shape: AttentionShape, page_size: int, device: torch.device) -> None:
        """Rows of up to 16 scattered pages."""
        self.shape = shape
        self.device = device
        self.reference = TorchAttention(shape, page_size)
        num_pages, context = _DECODE_ROWS * _PAGES_PER_ROW, _PAGES_PER_ROW * page_size
        self.pages = self._random(num_pages + 1, 2, shape.num_kv_heads, page_size, shape.head_dim)
        starts = [context - 1 - row * page_size // 5 for row in range(_DECODE_ROWS)]
        self.decode = self._rows(0, starts, [1] * _DECODE_ROWS)
        self.prefill = self._rows(4, [0, context // 2, 7, 0], [context, context // 2, context // 4, 1])

    @staticmethod
    def num_tokens(page_size: int) -> int:
        """Tokens of its largest step, or a few more."""
        return 2 * _PAGES_PER_ROW * page_size + _DECODE_ROWS

    def error(self, backend: AttentionBackend[StepAttention], rows: Rows) -> float:
        """Largest difference from the reference, over the reference's largest value; NaN where there is one."""
        given = self._attend(backend, rows)().double()
        right = self._attend(self.reference, rows)().double()
        return float((given - right).abs().max() / right.abs().max())

    def us(self, backend: AttentionBackend[StepAttention], rows: Rows) -> float:
        """Microseconds of the device for one layer, without what the host needs to launch it."""
        run = self._attend(backend, rows)
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

    def _attend(self, backend: AttentionBackend[StepAttention], rows: Rows) -> Callable[[], Tensor]:
        """The step of these rows, with the same queries, keys and values for every backend."""
        generator = torch.Generator(self.device).manual_seed(0)
        q_THE, k_TGE, v_TGE = (
            self._random(rows.num_tokens, num_heads, self.shape.head_dim, generator=generator)
            for num_heads in (self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads)
        )
        step = backend.prepare(rows)
        return lambda: step.forward(q_THE, k_TGE, v_TGE, self.pages)

    def _random(self, *size: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(*size, dtype=self.shape.dtype, device=self.device, generator=generator)

    def _rows(self, num_prefill: int, starts: list[int], lengths: list[int]) -> Rows:
        num_pages = self.pages.shape[0] - 1
        scattered = torch.randperm(num_pages, device=self.device)[: _PAGES_PER_ROW * len(starts)]
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
