"""FP8 checkpoints of a bfloat16 one: blocks of 128 x 128, as DeepSeek publishes, or a scale for each output.

python tests/plait_testing/fp8_models.py tests/models/recall-gqa FOLDER --form blocks
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Literal, get_args

import safetensors.torch
from plait_kernels.linear.fp8 import Fp8Weight, quantise_blocks, quantise_outputs
from torch import Tensor

Form = Literal["blocks", "channel"]
_QUANTISED = re.compile(r"\.(\w+_proj|kv_a_proj_with_mqa)\.weight$")
"""Of layers and experts; routers, embeddings and the head stay as they are."""
_STATED: dict[Form, dict[str, object]] = {
    "blocks": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    },
}
_ENDINGS: dict[Form, str] = {"blocks": "_scale_inv", "channel": "_scale"}


def write_fp8(model: Path, folder: Path, form: Form) -> None:
    """The model's folder with FP8 matrices and their scales."""
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    for name in [name for name in tensors if _QUANTISED.search(name)]:
        made = _quantised(tensors[name].float(), form)
        tensors[name] = made.stored_OI
        tensors[name + _ENDINGS[form]] = made.scale if form == "blocks" else made.scale[:, None].contiguous()
    _write(model, folder, tensors, {"quantization_config": _STATED[form]})


def write_dequantised(model: Path, folder: Path, form: Form) -> None:
    """The same weights in the model's own type, for a reference that knows no FP8."""
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    for name in [name for name in tensors if _QUANTISED.search(name)]:
        tensors[name] = _quantised(tensors[name].float(), form).dequantised().to(tensors[name].dtype)
    _write(model, folder, tensors, {})


def _quantised(weight_OI: Tensor, form: Form) -> Fp8Weight:
    return quantise_blocks(weight_OI) if form == "blocks" else quantise_outputs(weight_OI)


def _write(model: Path, folder: Path, tensors: dict[str, Tensor], more: dict[str, object]) -> None:
    shutil.copytree(model, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | more, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--form", choices=get_args(Form), required=True)
    options = parser.parse_args()
    write_fp8(options.model, options.folder, options.form)


if __name__ == "__main__":
    main()
