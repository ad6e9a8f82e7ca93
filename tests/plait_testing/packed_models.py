"""Checkpoints in packed integers of a 16-bit one, as AWQ, GPTQ and compressed-tensors write them.

python tests/plait_testing/packed_models.py tests/models/recall-gqa FOLDER --form awq --group-size 64

Matrices are rounded to the nearest, without the methods' calibration: the files are theirs, the errors are not.
Shapes: O outputs, I inputs, G groups, W words.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

QUANTISED = re.compile(r"\.(\w+_proj|w[123]|kv_a_proj_with_mqa)\.weight$")
"""Of layers and experts; routers, embeddings and the head stay as they are."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output in each of a word's places, the lowest first."""

_NVFP4_LARGEST = 448.0
"""Scale of a group, as e4m3."""
_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
"""Twice the values of e2m1, by their bits."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a matrix is quantised and stored."""

    method: str
    """awq, gptq, gptq_v2, compressed-tensors; mxfp4, whose groups are of 32; nvfp4 or modelopt, whose are of 16."""
    bits: int = 4
    is_symmetric: bool = True
    is_act_order: bool = False


FORMS = {
    "awq": Form("awq", is_symmetric=False),
    "gptq": Form("gptq"),
    "gptq-zeros": Form("gptq", is_symmetric=False),
    "gptq-v2-zeros": Form("gptq_v2", is_symmetric=False),
    "gptq-8": Form("gptq", bits=8),
    "gptq-8-zeros": Form("gptq", bits=8, is_symmetric=False),
    "gptq-act-order": Form("gptq", is_act_order=True),
    "compressed": Form("compressed-tensors"),
    "compressed-zeros": Form("compressed-tensors", is_symmetric=False),
    "compressed-8": Form("compressed-tensors", bits=8),
    "compressed-act-order": Form("compressed-tensors", is_act_order=True),
    "mxfp4": Form("mxfp4"),
    "nvfp4": Form("nvfp4"),
    "nvfp4-modelopt": Form("modelopt"),
}


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix ``(quant - zero) * scale``, each input with its group's."""

    quant_OI: Tensor
    zero_OG: Tensor
    scale_OG: Tensor
    group_I: Tensor

    def exactly(self) -> Tensor:
        """float64 ``[O, I]``."""
        centred = self.quant_OI - self.zero_OG[:, self.group_I]
        return centred.double() * self.scale_OG[:, self.group_I].double()


def quantise(weight_OI: Tensor, form: Form, group_size: int) -> Quantised:
    """Rounded to the nearest; ``group_size`` -1 is the whole row."""
    if form.method == "mxfp4":
        return _quantise_mxfp4(weight_OI)
    if form.method in ("nvfp4", "modelopt"):
        return _quantise_nvfp4(weight_OI)
    num_outputs, num_inputs = weight_OI.shape
    size, most = num_inputs if group_size < 0 else group_size, (1 << form.bits) - 1
    order = torch.randperm(num_inputs) if form.is_act_order else torch.arange(num_inputs)
    runs = weight_OI.float()[:, order].unflatten(1, (-1, size))
    low, high = runs.amin(2).clamp(max=0), runs.amax(2).clamp(min=0)
    span = 2 * runs.abs().amax(2) if form.is_symmetric else high - low
    scale_OG = (span / most).clamp(min=1e-5).half()
    middle = torch.full((num_outputs, runs.shape[1]), (most + 1) // 2)
    zero_OG = middle if form.is_symmetric else (-low / scale_OG.float()).round().long().clamp(0, most)
    group_I = torch.empty(num_inputs, dtype=torch.long)
    group_I[order] = torch.arange(num_inputs) // size
    quant = (weight_OI.float() / scale_OG.float()[:, group_I]).round().long() + zero_OG[:, group_I]
    return Quantised(quant.clamp(0, most), zero_OG, scale_OG, group_I)


def _quantise_mxfp4(weight_OI: Tensor) -> Quantised:
    """Twice the values and half the scales: integers from -12 to 12, a zero of 16."""
    runs = weight_OI.double().unflatten(1, (-1, 32))
    exponent_OG = runs.abs().amax(2).clamp(min=1e-30).log2().floor() - 2
    doubled = runs / 2 ** (exponent_OG[..., None] - 1)
    nearest = _DOUBLED[(doubled[..., None] - _DOUBLED).abs().argmin(-1)].flatten(1)
    group_I = torch.arange(weight_OI.shape[1]) // 32
    return Quantised(nearest + 16, torch.full(exponent_OG.shape, 16), 2 ** (exponent_OG - 1), group_I)


def _quantise_nvfp4(weight_OI: Tensor) -> Quantised:
    """As MXFP4; the matrix's scale is a power of two, so that products are exact in float32."""
    runs = weight_OI.double().unflatten(1, (-1, 16))
    needed_OG = runs.abs().amax(2) / 6
    whole = _nvfp4_whole(needed_OG)
    stored = (needed_OG / whole).to(torch.float8_e4m3fn).double()
    scale_OG = stored.clamp(min=2.0**-9) * whole / 2
    doubled = runs / scale_OG[..., None]
    nearest = _DOUBLED[(doubled[..., None] - _DOUBLED).abs().argmin(-1)].flatten(1)
    group_I = torch.arange(weight_OI.shape[1]) // 16
    return Quantised(nearest + 16, torch.full(scale_OG.shape, 16), scale_OG, group_I)


def _nvfp4_whole(scale_OG: Tensor) -> float:
    """By which a matrix's scales are multiplied, so that the largest is one of e4m3."""
    return 2.0 ** math.ceil(math.log2(max(float(scale_OG.max()), 1e-30) / _NVFP4_LARGEST))


def pack(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 words of the last side, padded with zeros; ``order`` is that of a word's values, lowest first."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(values.long(), (0, -values.shape[-1] % per_word))
    places = padded.unflatten(-1, (-1, per_word))[..., list(order or range(per_word))]
    words = sum((places[..., i] << i * bits for i in range(per_word)), start=torch.zeros(1, dtype=torch.long))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().contiguous()


def tensors_of(module: str, made: Quantised, form: Form) -> dict[str, Tensor]:
    """What the files hold of a matrix."""
    if form.method == "compressed-tensors":
        return _compressed(module, made, form)
    if form.method in ("mxfp4", "nvfp4", "modelopt"):
        return _floats(module, made, form)
    if form.method == "awq":
        return {
            f"{module}.qweight": pack(made.quant_OI.T, 4, _AWQ_ORDER),
            f"{module}.qzeros": pack(made.zero_OG.T, 4, _AWQ_ORDER),
            f"{module}.scales": made.scale_OG.T.contiguous(),
        }
    zeros = pack(made.zero_OG.T, form.bits)
    if form.method == "gptq":
        zeros = zeros - (0x11111111 if form.bits == 4 else 0x01010101)  # of whole words, as GPTQModel does
    return {
        f"{module}.qweight": pack(made.quant_OI, form.bits).T.contiguous(),
        f"{module}.qzeros": zeros,
        f"{module}.scales": made.scale_OG.T.contiguous(),
        f"{module}.g_idx": made.group_I.int(),
    }


def _floats(module: str, made: Quantised, form: Form) -> dict[str, Tensor]:
    code_OI = (made.quant_OI - 16)[..., None].eq(_DOUBLED).int().argmax(-1).to(torch.uint8)
    bytes_OX = code_OI[:, 0::2] | code_OI[:, 1::2] << 4
    if form.method == "mxfp4":
        exponent_OG = (made.scale_OG.log2() + 128).to(torch.uint8)
        return {f"{module}.weight_packed": bytes_OX, f"{module}.weight_scale": exponent_OG}
    whole = _nvfp4_whole(made.scale_OG * 2)
    scale_OG = (made.scale_OG * 2 / whole).to(torch.float8_e4m3fn)
    if form.method == "modelopt":
        wholes = {f"{module}.weight_scale_2": torch.tensor(whole), f"{module}.input_scale": torch.tensor(0.01)}
        return {f"{module}.weight": bytes_OX, f"{module}.weight_scale": scale_OG, **wholes}
    wholes = {f"{module}.weight_global_scale": torch.tensor([1 / whole])}
    return {f"{module}.weight_packed": bytes_OX, f"{module}.weight_scale": scale_OG, **wholes}


def _compressed(module: str, made: Quantised, form: Form) -> dict[str, Tensor]:
    tensors = {
        f"{module}.weight_packed": pack(made.quant_OI, form.bits),
        f"{module}.weight_scale": made.scale_OG,
        f"{module}.weight_shape": torch.tensor(made.quant_OI.shape),
    }
    if not form.is_symmetric:
        tensors[f"{module}.weight_zero_point"] = pack(made.zero_OG.T, form.bits).T.contiguous()
    if form.is_act_order:
        tensors[f"{module}.weight_g_idx"] = made.group_I.int()
    return tensors


def stated(form: Form, group_size: int) -> dict[str, object]:
    """The file's ``quantization_config``."""
    if form.method == "awq":
        more = {"version": "gemm", "zero_point": True, "modules_to_not_convert": None}
        return {"quant_method": "awq", "bits": 4, "group_size": group_size, **more}
    if form.method == "mxfp4":
        args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
        group_0 = {"targets": ["Linear"], "weights": args}
        named = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
        return {**named, "config_groups": {"group_0": group_0}}
    if form.method == "modelopt":
        more = {"producer": {"name": "modelopt"}, "kv_cache_scheme": None, "ignore": ["lm_head", "*router*"]}
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, **more}
    if form.method == "nvfp4":
        args = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
        group_0 = {"targets": ["Linear"], "weights": args}
        named = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
        return {**named, "config_groups": {"group_0": group_0}, "ignore": ["lm_head"]}
    if form.method == "compressed-tensors":
        weights = {
            "num_bits": form.bits,
            "type": "int",
            "symmetric": form.is_symmetric,
            "strategy": "channel" if group_size < 0 else "group",
            "group_size": None if group_size < 0 else group_size,
            "actorder": "group" if form.is_act_order else None,
        }
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
        named = {"quant_method": form.method, "format": "pack-quantized", "quantization_status": "compressed"}
        return {**named, "config_groups": groups, "ignore": ["lm_head", "re:.*router$"]}
    return {
        "quant_method": "gptq",
        "bits": form.bits,
        "group_size": group_size,
        "sym": form.is_symmetric,
        "desc_act": form.is_act_order,
        "checkpoint_format": form.method,
    }


def state_in_modelopts_file(folder: Path) -> None:
    """Let a folder state its quantisation as ModelOpt's older checkpoints do: in a file of its own alone."""
    config = json.loads((folder / "config.json").read_text())
    stated = {name: value for name, value in config.pop("quantization_config").items() if name != "quant_method"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))


def write_packed(model: Path, folder: Path, form: Form, group_size: int) -> None:
    """The model's folder with packed matrices, and what they mean as ``folder``'s neighbour of ending ``-upcast``."""
    packed = safetensors.torch.load_file(model / "model.safetensors")
    upcast = dict(packed)
    torch.manual_seed(0)
    for name in sorted(name for name in packed if QUANTISED.search(name)):
        made = quantise(packed.pop(name), form, group_size)
        packed.update(tensors_of(name.removesuffix(".weight"), made, form))
        upcast[name] = made.exactly().to(upcast[name].dtype)
    write_folder(model, folder, packed, {"quantization_config": stated(form, group_size)})
    write_folder(model, dense_twin(folder), upcast, {})


def dense_twin(folder: Path) -> Path:
    """Where ``write_packed`` puts the same weights unquantised, for a reference that knows no packed integers."""
    return folder.with_name(f"{folder.name}-upcast")


def write_folder(model: Path, folder: Path, tensors: dict[str, Tensor], more: dict[str, object]) -> None:
    """The model's folder with these tensors, and more in its configuration."""
    shutil.copytree(model, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | more, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--group-size", type=int, default=64)
    options = parser.parse_args()
    write_packed(options.model, options.folder, FORMS[options.form], options.group_size)


if __name__ == "__main__":
    main()
