"""The matrices of a model by what becomes of them: which may be quantised, and what ranks cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plait.plan.stored_form import StoredForm

if TYPE_CHECKING:
    from plait.plan.model import PlannedModel

DENSE_BYTES = 2
"""Of an element that is not quantised."""
HEAD, ATTENTION, MLP, SHARED, EXPERTS = "head", "attention", "MLP", "shared experts", "experts"
_STACKED = (SHARED, EXPERTS)
"""Held in one stack."""
Layers = frozenset[int]


@dataclass(frozen=True, slots=True)
class Part:
    """Alike matrices of some layers."""

    name: str
    """HEAD: the embedding too; ATTENTION, MLP, SHARED or EXPERTS."""
    num_elements: float
    """Of all layers."""
    num_inputs: int
    """Of each matrix."""
    module: str = ""
    """Its name below a layer; empty if it is never quantised."""
    layers: Layers = frozenset()
    is_cut: bool = False
    """Whether ranks divide the inputs; the outputs otherwise."""

    def cuts(self, ranks: Callable[[Part], int]) -> int:
        """Pieces of each row of inputs."""
        return ranks(self) if self.is_cut else 1


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A part as one kind of layout holds it."""

    part: Part
    quantised: float
    """Share of the elements that stays quantised."""
    num_bytes: float
    """On all ranks of a replica."""


def hold(parts: tuple[Part, ...], form: StoredForm | None, ranks: Callable[[Part], int]) -> tuple[HeldPart, ...]:
    """Each part on so many ranks. Experts of a layer are held alike: what cuts one matrix decides for all."""
    if form is None:
        return tuple(_dense_part(part) for part in parts)
    taken = {part for part in parts if part.module and form.takes_shard(part.num_inputs, part.cuts(ranks))}
    is_stacked = not form.is_mixed and all(part in taken for part in parts if part.name in _STACKED)
    kept = {part for part in taken if is_stacked or part.name not in _STACKED}
    return tuple(_kept_part(part, form, part.cuts(ranks)) if part in kept else _dense_part(part) for part in parts)


@dataclass(frozen=True, slots=True)
class ActOrderCost:
    """Experts in 16 bits that would stay quantised if the files had no act-order."""

    names: tuple[str, ...]
    num_bytes: float
    """On all ranks of a replica."""
    quantised_bytes: float
    """What they would take."""


def act_order_cost(parts: tuple[Part, ...], form: StoredForm | None) -> ActOrderCost | None:
    """None if act-order costs nothing. What ranks cut is left out."""
    if form is None or not form.is_mixed:
        return None
    held, in_order = (hold(parts, each, lambda _part: 1) for each in (form, replace(form, is_mixed=False)))
    upcast = [(own, other) for own, other in zip(held, in_order, strict=True) if own.quantised < other.quantised]
    if not upcast:
        return None
    names = tuple(dict.fromkeys(own.part.name for own, _ in upcast))
    return ActOrderCost(names, sum(own.num_bytes for own, _ in upcast), sum(other.num_bytes for _, other in upcast))


def _dense_part(part: Part) -> HeldPart:
    return HeldPart(part, 0.0, part.num_elements * DENSE_BYTES)


def _kept_part(part: Part, form: StoredForm, num_cuts: int) -> HeldPart:
    kept, per_element = _kept(part, form), form.bytes_per_element(part.num_inputs // num_cuts)
    return HeldPart(part, kept, part.num_elements * (kept * per_element + (1 - kept) * DENSE_BYTES))


def _kept(part: Part, form: StoredForm) -> float:
    """Share of the layers whose module the files quantise."""
    if not form.ignored:
        return 1.0
    kept = sum(form.keeps(f"model.layers.{layer}.{part.module}") for layer in part.layers)
    return kept / max(1, len(part.layers))


def parts_of(model: PlannedModel) -> tuple[Part, ...]:
    """All that the simulator counts: norms, biases and routers are left out."""
    others = (_head(model), *_latent(model), *_output(model), *_dense(model), *_experts(model))
    inner = model.size.weight_bytes / DENSE_BYTES - sum(part.num_elements for part in others)
    hidden, every = int(model.config["hidden_size"]), frozenset(range(model.num_layers))
    return (Part(ATTENTION, inner, hidden, "self_attn.q_proj", every), *(part for part in others if part.num_elements))


def _head(model: PlannedModel) -> Part:
    copies = 1 if model.config.get("tie_word_embeddings") else 2
    hidden = int(model.config["hidden_size"])
    return Part(HEAD, copies * float(model.config["vocab_size"]) * hidden, hidden)


def _latent(model: PlannedModel) -> Iterator[Part]:
    """MLA's up-projection, which decoding multiplies queries with."""
    if model.is_mla:
        config, heads = model.config, model.heads[0]
        width = heads * (config["qk_nope_head_dim"] + config["v_head_dim"])
        yield Part(ATTENTION, float(model.num_layers * config["kv_lora_rank"] * width), config["kv_lora_rank"])


def _output(model: PlannedModel) -> Iterator[Part]:
    width = model.heads[0] * (model.config["v_head_dim"] if model.is_mla else model.head_dim)
    num_elements, every = model.num_layers * width * model.config["hidden_size"], frozenset(range(model.num_layers))
    yield Part(ATTENTION, float(num_elements), width, "self_attn.o_proj", every, is_cut=True)


def _dense(model: PlannedModel) -> Iterator[Part]:
    yield from _mlp(model, MLP, model.dense_layers, model.config["intermediate_size"], 1, "mlp")


def _experts(model: PlannedModel) -> Iterator[Part]:
    layers, config = frozenset(range(model.num_layers)) - model.dense_layers, model.config
    width, shared = config.get("moe_intermediate_size") or 0, config.get("n_shared_experts") or 0
    yield from _mlp(model, EXPERTS, layers, width, model.num_experts, f"{model.moe_module}.experts.0")
    yield from _mlp(model, SHARED, layers, width, shared, f"{model.moe_module}.shared_experts")


def _mlp(model: PlannedModel, name: str, layers: Layers, width: int, copies: int, module: str) -> Iterator[Part]:
    hidden = int(model.config["hidden_size"])
    of_one = float(len(layers) * copies * hidden * width)
    yield Part(name, 2 * of_one, hidden, f"{module}.gate_proj", layers)
    yield Part(name, of_one, width, f"{module}.down_proj", layers, is_cut=True)
