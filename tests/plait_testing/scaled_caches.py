"""Checkpoints that carry scales of an FP8 cache, measured as llm-compressor and ModelOpt measure them.

python tests/plait_testing/scaled_caches.py tests/models/recall-gqa FOLDER --style compressed-tensors
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import safetensors.torch
import torch
from plait_kernels.kv_cache import FP8, PageScales, to_cache_dtype
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from plait_testing import recall

Style = Literal["compressed-tensors", "modelopt"]
_LARGEST = torch.finfo(FP8).max
_NAMES: dict[Style, tuple[str, str]] = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
}
_STATED: dict[Style, dict[str, object]] = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {
            "num_bits": 8,
            "type": "float",
            "strategy": "tensor",
            "dynamic": False,
            "symmetric": True,
        },
    },
    "modelopt": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
}
_NUM_PROMPTS, _CONTEXT = 4, 512


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """What an FP8 cache means, number by number: keys and values are rounded over their layer's scales."""

    def __init__(self, scales: Sequence[PageScales]) -> None:
        super().__init__()
        self.scales = scales

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rounded = (
            (to_cache_dtype(values, FP8, scale).double() * scale).to(values.dtype)
            for values, scale in zip((key_states, value_states), self.scales[layer_idx], strict=True)
        )
        keys, values = super().update(*rounded, layer_idx, *args, **kwargs)
        return keys, values


def measured_scales(model: PreTrainedModel, prompts: Sequence[Tensor]) -> list[PageScales]:
    """Of each layer: the largest key and value of the prompts (ids ``[1, T]``) become float8's largest number."""
    largest: list[tuple[float, float]] = []
    for ids in prompts:
        with torch.inference_mode():
            layers = model(ids, use_cache=True).past_key_values.layers
        seen = [(float(layer.keys.abs().max()), float(layer.values.abs().max())) for layer in layers]
        largest = [(max(a[0], b[0]), max(a[1], b[1])) for a, b in zip(largest or seen, seen, strict=True)]
    return [PageScales(k / _LARGEST, v / _LARGEST) for k, v in largest]


def add_scales(folder: Path, scales: Sequence[PageScales], style: Style) -> None:
    """Write them into a checkpoint of one shard, and say so in its configuration beside what that says of weights."""
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for layer, pair in enumerate(scales):
        for name, scale in zip(_NAMES[style], pair, strict=True):
            tensors[f"model.layers.{layer}.{name}"] = torch.tensor([scale])
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    stated = _STATED[style] | config.get("quantization_config", {})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated}, indent=1))


def write_scaled(model: Path, folder: Path, style: Style) -> list[PageScales]:
    """A check model with the scales that its own problems show."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = recall.problems(seed=7, num=_NUM_PROMPTS, context=_CONTEXT)
    prompts = [
        tokenizer.apply_chat_template(each["messages"], add_generation_prompt=True, return_tensors="pt")["input_ids"]
        for each in asked
    ]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    scales = measured_scales(reference, prompts)
    add_scales(folder, scales, style)
    return scales


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--style", choices=get_args(Style), required=True)
    options = parser.parse_args()
    for layer, scales in enumerate(write_scaled(options.model, options.folder, options.style)):
        print(f"layer {layer}: k {scales.k:.6g}, v {scales.v:.6g}")


if __name__ == "__main__":
    main()
