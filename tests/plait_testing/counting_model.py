"""A model whose every token says exactly which tokens it could see, and a rank that runs it.

The hidden state of a position is a hash of all tokens of its context, read back from the pages of the cache by the
page table: a wrong page, position, length or token changes what is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from plait_kernels.kv_cache import PageScales
from plait_worker.attention.backend import StepAttention
from plait_worker.attention.model_attention import ModelAttention
from plait_worker.attention.spec import AttentionSpec, MhaShape
from plait_worker.cache import CacheSpec, KVCache
from plait_worker.model_config import ModelConfig, RopeConfig
from plait_worker.parallel import Parallel
from plait_worker.rank import Rank
from plait_worker.rows import Rows
from plait_worker.slots import Slots
from torch import Tensor

VOCAB = 97
HEADS = MhaShape(1, 1, 1, 1.0, torch.float32)


def next_token(context: list[int]) -> int:
    """What the model samples, greedily, after these tokens."""
    return sum((place + 1) * (token + 1) for place, token in enumerate(context)) * 31 % VOCAB


@dataclass(frozen=True)
class Unplanned:
    """An attention backend with nothing to prepare."""

    name: str = "unplanned"
    is_capturable: bool = False
    captured_prefill: None = None

    def prepare(self, rows: Rows) -> StepAttention:
        return Seen(rows)


@dataclass(frozen=True)
class Seen:
    """Does nothing with the rows."""

    rows: Rows

    def forward(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, pages: Tensor, _scales: PageScales) -> Tensor:
        return q_THD


@dataclass
class CountingModel:
    """Implements ``Model``; counts what it is asked to compute."""

    num_tokens: int = 0
    num_dummy_tokens: int = 0
    """Rows whose whole table is the dummy page."""
    num_head_rows: list[int] = field(default_factory=list)
    first_positions: list[int] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    weight_bytes: int = 0
    quantised_types: frozenset[str] = frozenset()
    attention_specs: Sequence[AttentionSpec] = (HEADS,)
    cache_specs: Sequence[CacheSpec] = (CacheSpec("full", HEADS),)
    config: ModelConfig = field(
        default_factory=lambda: ModelConfig(
            architecture="CountingForCausalLM",
            vocab_size=VOCAB,
            hidden_size=1,
            intermediate_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            norm_eps=1e-6,
            rope=RopeConfig(theta=1e4),
            max_positions=4096,
            tie_embeddings=False,
        )
    )

    def forward(self, rows: Rows, cache: KVCache, attention: Sequence[StepAttention]) -> Tensor:
        self.num_tokens += rows.num_tokens
        self.first_positions += rows.starts[: rows.num_prefill]
        row_of_T = torch.repeat_interleave(torch.arange(rows.num_rows), torch.tensor(rows.lengths))
        pages_T = rows.page_table_RW[row_of_T, rows.positions_T // cache.page_size]
        is_dummy_T = (rows.page_table_RW == cache.dummy_page).all(1)[row_of_T]
        assert torch.equal(pages_T == cache.dummy_page, is_dummy_T)
        self.num_dummy_tokens += int(is_dummy_T.sum())
        memory_NP = cache.layers[0][:, 0, 0, :, 0]
        memory_NP[pages_T, rows.positions_T % cache.page_size] = rows.token_ids_T.float()
        context_RC = memory_NP[rows.page_table_RW].flatten(1)
        weight_C = torch.arange(1, context_RC.shape[1] + 1)
        sums_RC = ((context_RC.long() + 1) * weight_C).cumsum(1)
        return (sums_RC[row_of_T, rows.positions_T] * 31 % VOCAB).float()[:, None]

    def logits(self, hidden_SD: Tensor) -> Tensor:
        self.num_head_rows.append(hidden_SD.shape[0])
        distance_SV = (torch.arange(VOCAB) - hidden_SD).abs()
        return -torch.minimum(distance_SV, VOCAB - distance_SV)

    def shard_logits(self, hidden_SD: Tensor, out_SU: Tensor | None = None) -> Tensor:
        logits_SV = self.logits(hidden_SD)
        return logits_SV if out_SU is None else out_SU.copy_(logits_SV)

    def whole_logits(self, logits_SU: Tensor) -> Tensor:
        return logits_SU

    def own_rows_of_logits(self, logits_SU: Tensor) -> Tensor:
        return logits_SU

    def greedy_ids(self, logits_SU: Tensor) -> Tensor:
        return logits_SU.argmax(dim=1)


def counting_rank(
    page_size: int = 16, num_pages: int = 64, num_slots: int = 8, max_model_len: int = 512
) -> tuple[Rank, CountingModel]:
    model = CountingModel()
    cpu = torch.device("cpu")
    rank = Rank(
        model=model,
        cache=KVCache(model.cache_specs, num_pages, page_size, cpu),
        attention=ModelAttention([Unplanned()]),
        slots=Slots(num_slots, num_pages, page_size, max_model_len, cpu, VOCAB),
        parallel=Parallel(),
    )
    return rank, model
