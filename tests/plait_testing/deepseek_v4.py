"""Random DeepSeek-V4 models that show every fault, and requests stepped over one with caches full of other values.

transformers' own initialisation hides faults: it sets sinks, biases and tables to zero and factors to one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from plait_worker.cache import KVCache
from plait_worker.models.model import Model
from plait_worker.rows import Rows, Save
from plait_worker.slot_state import StateSizes
from torch import Tensor

from plait_testing.attention_cases import cpu_attention

CPU = torch.device("cpu")
VOCAB = 61
UNSEEN = 777.0
"""What caches hold before anything is written: no row may see it."""
DENSE, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "head_dim": 24,
    "q_lora_rank": 20,
    "num_experts_per_tok": 2,
    "n_routed_experts": 6,
    "sliding_window": 16,
    "o_groups": 4,
    "o_lora_rank": 12,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 3,
    "partial_rotary_factor": 8 / 24,
    "max_position_embeddings": 4096,
    "initializer_range": 0.08,
    "compress_rates": {CSA: 4, HCA: 16},
    "num_nextn_predict_layers": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixed": {
        "layer_types": [DENSE, CSA, HCA, CSA, HCA],
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"],
        "rope_parameters": YARN,
        "swiglu_limit": 0.3,
    },
    "all CSA without YaRN": {"layer_types": [CSA] * 3, "mlp_layer_types": ["moe"] * 3},
    "Pro's order": {
        "layer_types": [HCA, HCA, CSA, HCA],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "rope_parameters": YARN,
    },
    "real ratios": {
        "layer_types": [DENSE, CSA, HCA],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "rope_parameters": YARN,
        "compress_rates": {CSA: 4, HCA: 128},
        "sliding_window": 128,
        "index_topk": 24,
    },
}


def random_v4(name: str, seed: int = 0, **changes: Any) -> transformers.DeepseekV4ForCausalLM:
    """A model of one of ``CONFIGS``, in float32."""
    settings = {**TINY, **CONFIGS[name], **changes}
    torch.manual_seed(seed)
    config = transformers.DeepseekV4Config(num_hidden_layers=len(settings["layer_types"]), **settings)
    model = transformers.DeepseekV4ForCausalLM(config).float().eval()
    with torch.no_grad():
        for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _draw(tensor_name, tensor, config.n_routed_experts)
        for module in model.modules():
            if type(module).__name__.endswith("Router"):
                module.weight.normal_(0, 0.5)
    return model


def _draw(name: str, tensor: Tensor, num_experts: int) -> None:
    if name.endswith("tid2eid"):
        tensor.copy_(torch.rand(len(tensor), num_experts).argsort(dim=1)[:, : tensor.shape[1]])
    elif name.endswith(("sinks", "position_bias", "hc.base", "hc_base")):
        tensor.normal_(0, 1)
    elif name.endswith(("hc.scale", "hc_scale")) or "norm" in name:
        tensor.uniform_(0.5, 1.5)
    elif name.endswith(("hc.fn", "hc_fn")) or name.endswith("e_score_correction_bias"):
        tensor.normal_(0, 0.3)


def random_ids(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_logprobs(model: transformers.DeepseekV4ForCausalLM, ids: Sequence[int]) -> Tensor:
    """Of every position, in one forward."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


@dataclass
class V4Driver:
    """Requests by name, each with a slot and pages of its own; whatever was not written is ``UNSEEN``."""

    model: Model[Any]
    page_size: int = 16
    num_pages: int = 128
    num_slots: int = 8
    num_snapshots: int = 4
    num_drafts: int = 0
    max_tokens: int = 1024
    pages: dict[str, list[int]] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = StateSizes(self.num_slots, self.max_tokens, self.num_snapshots, self.num_drafts)
        self.cache = KVCache(self.model.cache_specs, self.num_pages, self.page_size, CPU, sizes)
        for pages, state in zip(self.cache.entry_pages, self.cache.states, strict=True):
            for tensor in (*pages, state.raw, state.sums, state.last, state.saved_rings, state.saved_last):
                tensor.fill_(UNSEEN)
        self.attention = cpu_attention(self.model.attention_specs, self.page_size, 64, self.max_tokens)
        generator = torch.Generator().manual_seed(3)
        self.free_pages = torch.randperm(self.num_pages, generator=generator).tolist()
        self.free_slots = torch.randperm(self.num_slots, generator=generator).tolist()

    def step(
        self,
        prefill: Mapping[str, Sequence[int]],
        decode: Mapping[str, int] | None = None,
        saves: Sequence[tuple[str, int, int]] = (),
    ) -> dict[str, Tensor]:
        """One forward over all rows; log-probabilities ``[length, V]`` at each row's positions.

        ``saves`` are a request, a position and a snapshot each.
        """
        chunks = {**prefill, **{name: [token] for name, token in (decode or {}).items()}}
        rows = self._rows(chunks, len(prefill), saves)
        hidden = self.model.forward(rows, self.cache, self.attention.prepare(rows))
        logprobs = self.model.logits(hidden).log_softmax(-1)
        for name, chunk in chunks.items():
            self.lengths[name] += len(chunk)
        return dict(zip(chunks, logprobs.split(rows.lengths), strict=True))

    def free(self, name: str) -> list[int]:
        """End a request; its slot and pages hold ``UNSEEN`` again."""
        slot, pages = self.slots.pop(name), self.pages.pop(name)
        for entry_pages, state in zip(self.cache.entry_pages, self.cache.states, strict=True):
            for pool in entry_pages:
                pool[pages] = UNSEEN
            for tensor in (state.rings(), state.sums, state.last):
                tensor[slot] = UNSEEN
        self.free_slots.append(slot)
        self.free_pages = pages + self.free_pages
        del self.lengths[name]
        return pages

    def restore(self, name: str, other: str, position: int, snapshot: int) -> None:
        """A request that begins behind another's first ``position`` tokens, whose state a snapshot holds."""
        self.pages[name] = self.pages[other][: position // self.page_size]
        self.lengths[name], slot = position, torch.tensor([self._slot(name)])
        for state in self.cache.states:
            state.restore(slot, torch.tensor([snapshot]))

    def _rows(
        self, chunks: Mapping[str, Sequence[int]], num_prefill: int, saves: Sequence[tuple[str, int, int]]
    ) -> Rows:
        starts = [self.lengths.setdefault(name, 0) for name in chunks]
        lengths = [len(chunk) for chunk in chunks.values()]
        tables = [
            self._table(name, start + length) for name, start, length in zip(chunks, starts, lengths, strict=True)
        ]
        width = -(-max(len(table) for table in tables) // 4) * 4
        names = list(chunks)
        return Rows(
            num_prefill=num_prefill,
            slots=[self._slot(name) for name in chunks],
            starts=starts,
            lengths=lengths,
            token_ids_T=torch.tensor([token for chunk in chunks.values() for token in chunk]),
            positions_T=torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]),
            page_table_RW=torch.tensor(
                [table + [self.cache.dummy_page] * (width - len(table)) for table in tables], dtype=torch.int32
            ),
            sample_index_S=torch.tensor(lengths).cumsum(0) - 1,
            saves=[Save(names.index(name), position, snapshot) for name, position, snapshot in saves],
        )

    def _slot(self, name: str) -> int:
        if name not in self.slots:
            self.slots[name] = self.free_slots.pop()
        return self.slots[name]

    def _table(self, name: str, num_tokens: int) -> list[int]:
        table = self.pages.setdefault(name, [])
        while len(table) * self.page_size < num_tokens:
            table.append(self.free_pages.pop())
        return list(table)
