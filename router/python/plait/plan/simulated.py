"""The shape and the rates by which the simulator computes a model whose matrices are quantised.

The simulator knows weights of one width and one rate of GEMMs. So it gets a shape of 16-bit weights that take as long
to read, part by part, and a rate at which they take as long to multiply. Tokens, KV cache and attention stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from plait.plan.gpus import FEW_ROWS, FORM_SHARES, FormShares, GemmShares, Gpu
from plait.plan.model import PlannedModel
from plait.plan.parts import ATTENTION, DENSE_BYTES, EXPERTS, MLP, SHARED, HeldPart

_LEAST_HIDDEN = 1 / 16
"""Of the model's hidden size, so that no other size grows beyond `_MOST`."""
_MOST = 1 << 24
"""Of any size, for the simulator."""


@dataclass(frozen=True, slots=True)
class Work:
    """Of parts of a model, in 16-bit elements."""

    num_read: float = 0.0
    """That take as long to read as the parts do."""
    num_multiplied: float = 0.0
    """That take a token as long to multiply, at the GPU's rate."""

    def __add__(self, other: Work) -> Work:
        return Work(self.num_read + other.num_read, self.num_multiplied + other.num_multiplied)

    def times(self, share: float) -> Work:
        """Of a share of them."""
        return Work(self.num_read * share, self.num_multiplied * share)


class SimulatedModel:
    """A model on one kind of GPU, as one layout holds it."""

    def __init__(self, model: PlannedModel, gpu: Gpu, held: tuple[HeldPart, ...], num_rows: int) -> None:
        """`held` are the parts of a replica, whose steps mostly sample `num_rows` tokens."""
        self._model, self._gpu, self._num_rows = model, gpu, num_rows
        self._flops = gpu.flops(model.num_experts > 0)
        self._work = {name: self._work_of_parts(held, name) for name in (ATTENTION, MLP, SHARED, EXPERTS)}
        self._num_attention = sum(each.part.num_elements for each in held if each.part.name == ATTENTION)
        self._hidden = self._hidden_size()
        token = sum((self._of_token(name) for name in self._work), Work())
        self._slowed = self._flops * token.num_read / token.num_multiplied

    def rates(self) -> dict[str, object]:
        """As `plait simulate --hardware FILE` reads them: rows of fewer elements travel more slowly."""
        link = self._gpu.link_bytes * self._hidden / self._model.config["hidden_size"]
        return self._gpu.rates(self._slowed, link)

    def config(self) -> dict[str, Any]:
        """As `--model FILE` does."""
        model, config = self._model, self._model.config
        num_sparse = model.num_layers - len(model.dense_layers)
        stacked = num_sparse * (model.num_experts + (config.get("n_shared_experts") or 0))
        widths = {
            "intermediate_size": self._width(self._work[MLP], len(model.dense_layers)),
            "moe_intermediate_size": self._width(self._work[SHARED] + self._work[EXPERTS], stacked),
        }
        sizes = {"hidden_size": self._hidden, "head_dim": model.head_dim, "vocab_size": self._vocab()} | widths
        return config | {name: min(size, _MOST) for name, size in sizes.items() if size}

    def _work_of_parts(self, held: Iterable[HeldPart], name: str) -> Work:
        form = self._model.storage.form
        shares = FormShares() if form is None else FORM_SHARES[form.title]
        reached = shares.experts if name in (SHARED, EXPERTS) else shares.dense
        return sum((self._work_of(each, reached) for each in held if each.part.name == name), Work())

    def _work_of(self, held: HeldPart, reached: GemmShares) -> Work:
        num_quantised = held.part.num_elements * held.quantised
        num_dense = held.part.num_elements - num_quantised
        read = (held.num_bytes / DENSE_BYTES - num_dense) / reached.reading
        if reached.few_rows_flops is not None:
            read = max(read, num_quantised * self._elements_of_rows() / reached.few_rows_flops)
        return Work(num_dense + read, num_dense + num_quantised / reached.flops)

    def _elements_of_rows(self) -> float:
        """Elements that are read while one is multiplied with a decode step's rows.

        The simulator's GEMMs have one rate, so that slower ones of few rows become a longer read.
        """
        return min(self._num_rows, FEW_ROWS) * self._gpu.copy_bytes / self._flops

    def _of_token(self, name: str) -> Work:
        num_experts = self._model.num_experts
        if name != EXPERTS or not num_experts:
            return self._work[name]
        return self._work[name].times(self._model.config["num_experts_per_tok"] / num_experts)

    def _hidden_size(self) -> int:
        """With which attention takes as long to read; MLA has matrices that do not grow with it."""
        model, hidden = self._model, int(self._model.config["hidden_size"])
        growing = model.num_layers * _attention_width(model)
        fixed = self._num_attention - growing * hidden
        found = (self._work[ATTENTION].num_read - fixed) / growing
        return min(_MOST, round(max(found, hidden * _LEAST_HIDDEN, 1)))

    def _width(self, work: Work, num_mlps: int) -> int:
        return round(work.num_read / (3 * self._hidden * num_mlps)) if num_mlps else 0

    def _vocab(self) -> int:
        """The head stays in 16 bits: it takes a step its own time, not that of the rates above."""
        config, reading = self._model.config, DENSE_BYTES / self._gpu.copy_bytes
        seconds = config["vocab_size"] * config["hidden_size"] * max(reading, 2 * self._num_rows / self._flops)
        return round(float(seconds) / max(reading, 2 * self._num_rows / self._slowed) / self._hidden)


def _attention_width(model: PlannedModel) -> int:
    """Elements of a layer's attention for each of the hidden size."""
    config, (heads, kv_heads) = model.config, model.heads
    if not model.is_mla:
        return 2 * (heads + kv_heads) * model.head_dim
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    query = config.get("q_lora_rank") or heads * (config["qk_nope_head_dim"] + rope)
    return int(query + latent + rope + heads * config["v_head_dim"])
