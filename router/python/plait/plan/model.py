"""What a plan needs of a model: its `config.json` alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from plait_proto import FAMILIES, UNDECODABLE, Family, family_of
from plait_proto.divided_model import DividedModel, check_layout

from plait._router import model_size
from plait.errors import ModelNotFoundError, SettingsError
from plait.gpu_sizes import ModelSize, kv_copies
from plait.plan.stored_form import Storage, config_fields, read_storage


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model's shape, and what its files hold."""

    config: dict[str, Any]
    size: ModelSize
    """With 16 bits an element."""
    context: int
    """Longest prompt plus output, in tokens."""
    family: Family
    dense_layers: frozenset[int]
    """Layers without experts."""
    storage: Storage

    @property
    def is_mla(self) -> bool:
        """Whether each rank holds the whole KV cache of a token."""
        return self.family.uses_mla

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer, or 0."""
        names = ("n_routed_experts", "num_experts", "num_local_experts")
        return next((int(self.config[name]) for name in names if self.config.get(name)), 0)

    @property
    def num_layers(self) -> int:
        """All of them."""
        return int(self.config["num_hidden_layers"])

    @property
    def moe_module(self) -> str:
        """Name of a layer's mixture of experts."""
        return "block_sparse_moe" if self.family.name == "minimax_m2" else "mlp"

    @property
    def head_dim(self) -> int:
        """Elements of a query head of GQA."""
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.heads[0])

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads, and key-value heads."""
        heads = self.config["num_attention_heads"]
        return heads, self.config.get("num_key_value_heads") or heads

    @property
    def divided(self) -> DividedModel:
        """What ranks divide."""
        return DividedModel(
            architecture=self.config["architectures"][0],
            num_heads=self.heads[0],
            has_mla=self.is_mla,
            mlp_width=self.config["intermediate_size"] if self.dense_layers else None,
            num_experts=self.num_experts,
            expert_width=self.config["moe_intermediate_size"] if self.num_experts else 0,
            has_shared_experts=bool(self.config.get("n_shared_experts")),
        )

    def takes(self, tp: int, dp: int = 1, *, dp_attention: bool = False) -> bool:
        """Whether a start accepts these ranks and replicas."""
        try:
            check_layout(self.divided, tp, dp, dp_attention=dp_attention)
        except ValueError:
            return False
        return True

    def kv_bytes_of_rank(self, num_ranks: int) -> float:
        """KV cache of one token on one of so many ranks, in 16 bits a value."""
        return self.size.kv_bytes_per_token * kv_copies(self.config, num_ranks) / num_ranks


def read_model(model: str, scratch: Path) -> PlannedModel:
    """The shape of a folder or a `config.json`; a copy for the simulator is written into `scratch`.

    Raises `ModelNotFoundError`, and `SettingsError` for a model that no GPU runs.
    """
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json" or not path.is_file():
        raise ModelNotFoundError(
            f"{model!r} is no folder with a config.json and no .json file; `plait plan` reads a model's config.json: "
            "give its folder, or the file"
        )
    copy = scratch / "config.json"
    try:
        fields = config_fields(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]), path)
        stated = dict(fields.values)
        found, storage = _check_family(stated, path), read_storage(stated, fields.where)
        dense = _dense_layers(stated)
        config = _as_loaded(stated, len(dense))
        copy.write_bytes(msgspec.json.encode(config))
        size = msgspec.json.decode(model_size(str(copy)), type=ModelSize)
    except (ValueError, OSError, *UNDECODABLE) as error:
        reason = str(error).removeprefix(f"{copy}: ")
        raise ModelNotFoundError(f"{path} does not describe a model that Plait knows: {reason}") from error
    return PlannedModel(config, size, config["max_position_embeddings"], found, dense, storage)


def _check_family(config: dict[str, Any], path: Path) -> Family:
    """The model's; raises as serve does, and for one that no GPU runs."""
    named = msgspec.convert(config.get("architectures") or ["none"], type=list[str])
    found = family_of(named[0])
    if found is None:
        served = ", ".join(name for each in FAMILIES for name in each.architectures)
        raise ModelNotFoundError(f"{path}: the architecture `{named[0]}` is not served; these are: {served}")
    if any(layer.attention == "compressed" for layer in found.layers):
        raise SettingsError(
            f"{named[0]} has no GPU kernels in this version, so there is nothing to plan; "
            "`plait serve` runs it with --device cpu"
        )
    return found


class _MoeLayers(msgspec.Struct, frozen=True):
    """Fields that say which layers have experts; a null counts as absent."""

    num_hidden_layers: Annotated[int, Meta(ge=1, le=1024)]
    n_routed_experts: int | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    first_k_dense_replace: int | None = None
    moe_layer_freq: int | None = None
    mlp_only_layers: list[int] | None = None
    decoder_sparse_step: int | None = None

    def is_dense(self, layer: int) -> bool:
        """DeepSeek's fields, and Qwen3-MoE's."""
        if not (self.n_routed_experts or self.num_experts or self.num_local_experts):
            return True
        if layer < (self.first_k_dense_replace or 0) or layer in (self.mlp_only_layers or ()):
            return True
        return bool(layer % (self.moe_layer_freq or 1) or (layer + 1) % (self.decoder_sparse_step or 1))


def _dense_layers(config: dict[str, Any]) -> frozenset[int]:
    stated = msgspec.convert(config, type=_MoeLayers)
    return frozenset(layer for layer in range(stated.num_hidden_layers) if stated.is_dense(layer))


def _as_loaded(config: dict[str, Any], num_dense: int) -> dict[str, Any]:
    """As the simulator reads it: in 16 bits, dense layers first, and MiniMax-M2's experts under the usual name."""
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    if config.get("num_local_experts") and "moe_intermediate_size" not in config:
        config["moe_intermediate_size"] = config.get("intermediate_size")
    return config | {"first_k_dense_replace": num_dense}
