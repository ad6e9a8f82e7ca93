"""A model on a CPU, driven without the step loop: every row's log-probabilities come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from plait_worker.cache import KVCache
from plait_worker.models.model import Model
from plait_worker.rows import Rows
from torch import Tensor

from plait_testing.attention_cases import cpu_attention

CPU = torch.device("cpu")


@dataclass
class Driver:
    """Requests by name, each with pages of its own out of a shuffled pool."""

    model: Model[Any]
    page_size: int = 16
    num_pages: int = 64
    mla_context_chunk_size: int = 64
    pages: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = KVCache(self.model.cache_specs, self.num_pages, self.page_size, CPU)
        self.attention = cpu_attention(self.model.attention_specs, self.page_size, self.mla_context_chunk_size)
        self.free = torch.randperm(self.num_pages).tolist()

    def step(self, prefill: dict[str, list[int]], decode: dict[str, int] | None = None) -> dict[str, Tensor]:
        """One forward over all rows; the log-probabilities ``[length, V]`` at each row's positions."""
        chunks = prefill | {name: [token] for name, token in (decode or {}).items()}
        rows = self._rows(chunks, len(prefill))
        hidden = self.model.forward(rows, self.cache, self.attention.prepare(rows))
        logprobs = self.model.logits(hidden).log_softmax(-1)
        for name, chunk in chunks.items():
            self.lengths[name] += len(chunk)
        return dict(zip(chunks, logprobs.split(rows.lengths), strict=True))

    def _rows(self, chunks: dict[str, list[int]], num_prefill: int) -> Rows:
        starts = [self.lengths.setdefault(name, 0) for name in chunks]
        lengths = [len(chunk) for chunk in chunks.values()]
        tables = [
            self._table(name, start + length) for name, start, length in zip(chunks, starts, lengths, strict=True)
        ]
        width = -(-max(len(table) for table in tables) // 4) * 4
        return Rows(
            num_prefill=num_prefill,
            slots=list(range(len(chunks))),
            starts=starts,
            lengths=lengths,
            token_ids_T=torch.tensor([token for chunk in chunks.values() for token in chunk]),
            positions_T=torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]),
            page_table_RW=torch.tensor(
                [table + [self.cache.dummy_page] * (width - len(table)) for table in tables], dtype=torch.int32
            ),
            sample_index_S=torch.tensor(lengths).cumsum(0) - 1,
        )

    def _table(self, name: str, num_tokens: int) -> list[int]:
        table = self.pages.setdefault(name, [])
        while len(table) * self.page_size < num_tokens:
            table.append(self.free.pop())
        return list(table)
