"""What a plan needs of a model: its `config.json` alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from plait_proto import UNDECODABLE, family_of

from plait._router import model_size
from plait.batch_sizes import ModelSize, kv_copies
from plait.errors import ModelNotFoundError, SettingsError

_BYTES = 2
"""Of a parameter in the worker's memory: it de-quantises FP8 checkpoints."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model's shape, as the worker loads it in 16 bits."""

    config: dict[str, Any]
    size: ModelSize
    context: int
    """Longest prompt plus output, in tokens."""

    @property
    def is_mla(self) -> bool:
        """Whether each rank holds the whole KV cache of a token."""
        return self.config.get("kv_lora_rank") is not None

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer, or 0."""
        names = ("n_routed_experts", "num_experts", "num_local_experts")
        return next((int(self.config[name]) for name in names if self.config.get(name)), 0)

    @property
    def expert_bytes(self) -> float:
        """Of all routed experts."""
        sparse = self.config["num_hidden_layers"] - self.config.get("first_k_dense_replace", 0)
        width = self.config.get("moe_intermediate_size", 0)
        return float(_BYTES * 3 * sparse * self.num_experts * self.config["hidden_size"] * width)

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads, and key-value heads."""
        heads = self.config["num_attention_heads"]
        return heads, self.config.get("num_key_value_heads") or heads

    def divides(self, num_ranks: int) -> bool:
        """Whether `--tp` may have this value; the worker says why not."""
        if num_ranks > self.heads[0] or (self.is_mla and self.heads[0] % num_ranks):
            return False
        has_dense_layers = not self.num_experts or self.config.get("first_k_dense_replace", 0) > 0
        names = ["intermediate_size"] * has_dense_layers + ["moe_intermediate_size"] * (self.num_experts > 0)
        return all(self.config[name] % num_ranks == 0 for name in names)

    def kv_bytes_of_rank(self, num_ranks: int) -> float:
        """KV cache of one token on one of so many ranks, in 16 bits a value."""
        return self.size.kv_bytes_per_token * kv_copies(self.config, num_ranks) / num_ranks


def read_model(model: str, scratch: Path) -> tuple[PlannedModel, Path]:
    """The shape of a folder or a `config.json`, and the file in `scratch` by which the simulator reads it.

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
        config = _as_loaded(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
        _check_runs_on_gpus(config)
        copy.write_bytes(msgspec.json.encode(config))
        size = msgspec.json.decode(model_size(str(copy)), type=ModelSize)
    except (ValueError, OSError, *UNDECODABLE) as error:
        reason = str(error).removeprefix(f"{copy}: ")
        raise ModelNotFoundError(f"{path} does not describe a model that Plait knows: {reason}") from error
    return PlannedModel(config, size, config["max_position_embeddings"]), copy


def _check_runs_on_gpus(config: dict[str, Any]) -> None:
    match config.get("architectures"):
        case [str(architecture), *_] if (family := family_of(architecture)) is not None:
            if any(layer.attention == "compressed" for layer in family.layers):
                raise SettingsError(
                    f"{architecture} has no GPU kernels in this version, so there is nothing to plan; "
                    "`plait serve` runs it with --device cpu"
                )


def _as_loaded(config: dict[str, Any]) -> dict[str, Any]:
    """With weights of 16 bits; MiniMax-M2 calls the experts' width `intermediate_size`."""
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    if config.get("num_local_experts") and "moe_intermediate_size" not in config:
        config["moe_intermediate_size"] = config.get("intermediate_size")
    return config
