"""MXFP4 files mean what OCP Microscaling Formats 1.0 defines, in blocks where those hold every scale."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from plait_testing.packed_models import FORMS, stated
from plait_worker.errors import ModelFilesError
from plait_worker.weights.formats import mxfp4
from plait_worker.weights.packed.folder import PackedFolder
from plait_worker.weights.safetensors_folder import SafetensorsFolder
from torch import Tensor

ALL_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def saved(path: Path, packed: Tensor, scale: Tensor, **changes: object) -> Path:
    safetensors.torch.save_file({"a.weight_packed": packed, "a.weight_scale": scale}, path / "model.safetensors")
    config = stated(FORMS["mxfp4"], 32) | changes
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


def opened(path: Path) -> PackedFolder:
    folder = SafetensorsFolder(path)
    assert folder.packed is not None
    return PackedFolder(folder, folder.packed)


def test_every_value_and_scale_is_read(tmp_path: Path) -> None:
    """The low half of a byte is the first input; a scale of bits e is 2 ** (e - 127)."""
    packed = torch.tensor([[2 * i | (2 * i + 1) << 4 for i in range(8)] * 2]).repeat(255, 1).to(torch.uint8)
    scale = torch.arange(255).to(torch.uint8)[:, None]
    read = opened(saved(tmp_path, packed, scale)).read("a.weight")
    exactly = torch.tensor(ALL_VALUES * 2).double() * 2.0 ** (torch.arange(255).double() - 127)[:, None]
    assert torch.equal(read, exactly.float())
    assert torch.equal(read[1:], mxfp4.dequantise(packed, 2.0 ** (scale.float() - 127))[1:])


@pytest.mark.parametrize(
    ("low", "high", "is_kept"), [(104, 143, True), (103, 127, False), (127, 144, False), (0, 254, False)]
)
def test_blocks_hold_the_scales_that_halves_have(low: int, high: int, is_kept: bool, tmp_path: Path) -> None:
    packed = torch.randint(0, 256, (64, 128)).to(torch.uint8)
    scale = torch.randint(120, 130, (64, 8)).to(torch.uint8)
    scale[5, 1], scale[60, 7] = low, high
    files = opened(saved(tmp_path, packed, scale))
    weight = files.block_weight("a.weight")
    assert (weight is not None) == (files.block_kind("a.weight") is not None) == is_kept
    if weight is not None:
        assert torch.equal(weight.dequantised(), files.read("a.weight"))


@pytest.mark.parametrize("exponent_type", [torch.float8_e8m0fnu, torch.uint8])
def test_scales_may_be_of_either_type(exponent_type: torch.dtype, tmp_path: Path) -> None:
    packed, scale = torch.full((8, 16), 0x42).to(torch.uint8), torch.full((8, 1), 128).to(torch.uint8)
    files = opened(saved(tmp_path, packed, scale.view(exponent_type)))
    assert files.read("a.weight")[0, :4].tolist() == [2.0, 4.0, 2.0, 4.0]


PACKED, SCALE = torch.zeros(8, 32).to(torch.uint8), torch.full((8, 2), 127).to(torch.uint8)
WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 32}
REFUSED: list[tuple[Tensor, Tensor, dict[str, object], str]] = [
    (PACKED, torch.full((8, 2), 255).to(torch.uint8), {}, "a.weight_scale holds a scale that is no number"),
    (PACKED, SCALE[:, :1].contiguous(), {}, "a.weight_scale has shape [8, 1], but quantization_config asks for [8, 2]"),
    (PACKED, SCALE.float(), {}, "a.weight_scale is F32"),
    (PACKED.float(), SCALE, {}, "a.weight_packed is F32"),
    (PACKED[:, :24].contiguous(), SCALE, {}, "has 48 inputs, which groups of 32 do not divide"),
    (PACKED, SCALE, {"config_groups": {"a": {"weights": WEIGHTS | {"group_size": 16}}}}, "in groups of 16"),
    (PACKED, SCALE, {"config_groups": {"a": {"weights": WEIGHTS | {"type": "int"}}}}, "of 4-bit int weights"),
    (PACKED, SCALE, {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized of 4-bit float weights in groups of 32"),
    (PACKED, SCALE, {"quant_method": "mxfp4"}, "quantisation mxfp4 is not supported"),
]


@pytest.mark.parametrize(("packed", "scale", "changes", "said"), REFUSED)
def test_other_forms_are_refused_by_name(
    packed: Tensor, scale: Tensor, changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFilesError, match=re.escape(said)):
        opened(saved(tmp_path, packed, scale, **changes)).read("a.weight")
