"""Whether a model can be divided among so many ranks."""

from __future__ import annotations

from plait_worker.model_config import ModelConfig

_MAX_LISTED_RANKS = 64


def refuse_uneven(config: ModelConfig, world: int) -> None:
    """Raise ``ValueError`` that names the dimension which ``world`` ranks cannot divide, and the numbers that work."""
    if config.num_heads < world:
        raise ValueError(f"--tp {world} is more than the model's {config.num_heads} attention heads; {_values(config)}")
    for name, size in _divided(config).items():
        if size % world:
            raise ValueError(f"--tp {world} does not divide the model's {name}, {size}; {_values(config)}")


def _divided(config: ModelConfig) -> dict[str, int]:
    """What every rank must hold an even share of; heads with keys and values of their own are not among them."""
    moe, sizes = config.moe, {}
    if config.mla is not None:
        sizes["attention heads (num_attention_heads)"] = config.num_heads
    if moe is None or moe.dense_layers:
        sizes["MLP width (intermediate_size)"] = config.intermediate_size
    if moe is not None:
        # Shared experts are so wide, or a multiple of it.
        sizes["experts' width (moe_intermediate_size)"] = moe.intermediate_size
    return sizes


def _values(config: ModelConfig) -> str:
    sizes, most = _divided(config).values(), min(config.num_heads, _MAX_LISTED_RANKS)
    working = [str(world) for world in range(1, most + 1) if all(size % world == 0 for size in sizes)]
    return f"these values of --tp work: {', '.join(working)}"
