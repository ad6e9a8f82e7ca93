"""Rows over a scattered pool of pages on the GPU, for one layer's attention or for a whole model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from plait_worker.attention.backend import AttentionBackend
from plait_worker.cache import KVCache
from plait_worker.models.model import Model
from plait_worker.rows import Rows
from torch import Tensor

from plait_testing.random_models import random_model

PAGE_SIZE = 64
GPU = torch.device("cuda")
NUM_TOKENS, CHUNK = 4096, 1500
"""Tokens of the prompt on which a model is compared with float32, and of a chunk."""
NUM_ROWS, NUM_DECODED = 15, 100
"""Rows that decode beside it, and how long."""
RANDOM: dict[str, Any] = {
    "vocab_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}
"""What random models have in common."""


def save_random(path: Path, config: transformers.PretrainedConfig, seed: int) -> None:
    """Weights are exact in bfloat16."""
    random_model(config, seed).to(torch.bfloat16).save_pretrained(path)


def make_rows(tables: list[list[int]], dummy: int, starts: list[int], ids: list[list[int]], num_prefill: int) -> Rows:
    """Rows whose tables are filled up with the dummy page."""
    width = -(-max(len(table) for table in tables) // 4) * 4
    lengths = [len(row) for row in ids]
    padded = [table + [dummy] * (width - len(table)) for table in tables]
    return Rows(
        num_prefill=num_prefill,
        slots=list(range(len(starts))),
        starts=starts,
        lengths=lengths,
        token_ids_T=torch.tensor([token for row in ids for token in row], device=GPU),
        positions_T=torch.cat([torch.arange(s, s + n, device=GPU) for s, n in zip(starts, lengths, strict=True)]),
        page_table_RW=torch.tensor(padded, dtype=torch.int32, device=GPU),
        sample_index_S=torch.tensor(lengths, device=GPU).cumsum(0) - 1,
    )


@dataclass
class GpuDriver:
    """Requests by name over one model; high pages are handed out first."""

    model: Model[Any]
    attention: AttentionBackend[Any]
    num_pages: int = 512
    pages: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = KVCache(self.model.cache_specs, self.num_pages, PAGE_SIZE, GPU)
        for layer in self.cache.layers:
            layer.fill_(448)  # what a row must not see is large, and finite in float8 too
        self.free = torch.randperm(self.num_pages).tolist()

    @torch.inference_mode()
    def step(self, prefill: dict[str, list[int]], decode: dict[str, int] | None = None) -> dict[str, Tensor]:
        """One forward over all rows; the log-probabilities ``[length, V]`` at each row's positions."""
        chunks = prefill | {name: [token] for name, token in (decode or {}).items()}
        starts = [self.lengths.setdefault(name, 0) for name in chunks]
        tables = [self._table(name, start + len(chunks[name])) for name, start in zip(chunks, starts, strict=True)]
        rows = make_rows(tables, self.cache.dummy_page, starts, list(chunks.values()), len(prefill))
        hidden = self.model.forward(rows, self.cache, (self.attention.prepare(rows),))
        logprobs = self.model.logits(hidden).log_softmax(-1)
        for name, chunk in chunks.items():
            self.lengths[name] += len(chunk)
        return dict(zip(chunks, logprobs.split(rows.lengths), strict=True))

    def _table(self, name: str, num_tokens: int) -> list[int]:
        table = self.pages.setdefault(name, [])
        while len(table) * PAGE_SIZE < num_tokens:
            table.append(self.free.pop())
        return list(table)


def logprobs(model: Model[Any], attention: AttentionBackend[Any], ids: list[int]) -> tuple[Tensor, Tensor]:
    """Of a long prompt ``[NUM_TOKENS, V]``, in chunks beside decoding rows; then of those rows' decoding alone."""
    driver = GpuDriver(model, attention)
    others = {f"row {row}": ids[200 * row : 200 * row + 65 * row + 1] for row in range(NUM_ROWS)}
    driver.step(others)
    chunks = [ids[begin : begin + CHUNK] for begin in range(0, NUM_TOKENS, CHUNK)]
    prompt = [
        driver.step({"prompt": chunk}, {name: ids[index] for name in others})["prompt"]
        for index, chunk in enumerate(chunks)
    ]
    steps = [driver.step({}, dict.fromkeys([*others, "prompt"], token)) for token in ids[:NUM_DECODED]]
    return torch.cat(prompt), torch.cat([logprobs for step in steps for logprobs in step.values()])


def divergence(right: Tensor, given: Tensor) -> Tensor:
    """Of each position, in nats."""
    return (right.exp() * (right - given)).sum(dim=-1)


def save_deepseek(path: Path, num_heads: int, q_rank: int | None) -> None:
    """Two dense layers: an expert that rounding turns to would hide what attention does."""
    config = transformers.DeepseekV3Config(
        hidden_size=512,
        first_k_dense_replace=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        q_lora_rank=q_rank,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        **RANDOM,
    )
    save_random(path, config, seed=num_heads)
