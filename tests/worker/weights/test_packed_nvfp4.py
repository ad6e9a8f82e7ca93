"""NVFP4 files mean what their two writers define: compressed-tensors and ModelOpt."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from plait_testing.packed_models import FORMS, quantise, stated, write_packed
from plait_worker.errors import ModelFilesError
from plait_worker.models import loader
from plait_worker.models.loader import load_model, open_checkpoint
from plait_worker.parallel import Parallel
from plait_worker.weights.formats.fp8 import FP8_ON_LOAD
from plait_worker.weights.packed.folder import PackedFolder
from plait_worker.weights.safetensors_folder import SafetensorsFolder
from torch import Tensor

CPU = torch.device("cpu")
ALL_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
DIALECTS = ("nvfp4", "nvfp4-modelopt")
both_dialects = pytest.mark.parametrize("dialect", DIALECTS)
FP8 = torch.float8_e4m3fn


def saved(path: Path, dialect: str, tensors: dict[str, Tensor], **changes: object) -> Path:
    safetensors.torch.save_file(tensors, path / "model.safetensors")
    config = stated(FORMS[dialect], 16) | changes
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


def matrix(dialect: str, packed: Tensor, scale: Tensor, factor: float) -> dict[str, Tensor]:
    """Its elements are multiplied by ``factor``."""
    if dialect == "nvfp4":
        whole = {"a.weight_global_scale": torch.tensor([1 / factor]), "a.input_global_scale": torch.ones(1)}
        return {"a.weight_packed": packed, "a.weight_scale": scale} | whole
    whole = {"a.weight_scale_2": torch.tensor(float(factor)), "a.input_scale": torch.tensor(1.0)}
    return {"a.weight": packed, "a.weight_scale": scale} | whole


def opened(path: Path) -> PackedFolder:
    folder = SafetensorsFolder(path)
    assert folder.packed is not None
    return PackedFolder(folder, folder.packed)


@both_dialects
def test_every_value_and_scale_is_read(dialect: str, tmp_path: Path) -> None:
    """The low half of a byte is the first input; scales are e4m3, and another one is for the matrix."""
    packed = torch.tensor([[2 * i | (2 * i + 1) << 4 for i in range(8)]]).repeat(127, 1).to(torch.uint8)
    scale = torch.arange(127).to(torch.uint8).view(FP8)[:, None]
    files = opened(saved(tmp_path, dialect, matrix(dialect, packed, scale, 2.0**-7)))
    exactly = torch.tensor(ALL_VALUES).double() * scale.double() * 2.0**-7
    assert files.names == {"a.weight"}
    assert files.shape("a.weight") == (127, 16)
    assert torch.equal(files.read("a.weight"), exactly.float())


@pytest.mark.parametrize("largest", [1e-3, 0.5, 20.0])
def test_the_check_models_writer_loses_as_little_of_any_size(largest: float) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    weight *= largest / weight.abs().max()
    error = (quantise(weight, FORMS["nvfp4"], 16).exactly() - weight).abs().max()
    assert error < largest / 6


@both_dialects
def test_a_matrix_scale_that_is_no_power_of_two_rounds_twice_at_most(dialect: str, tmp_path: Path) -> None:
    packed = torch.randint(0, 256, (40, 64)).to(torch.uint8)
    scale = torch.randint(8, 120, (40, 8)).to(torch.uint8).view(FP8)
    files = opened(saved(tmp_path, dialect, matrix(dialect, packed, scale, 0.00037)))
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
    exactly = torch.tensor(ALL_VALUES).double()[codes] * scale.double().repeat_interleave(16, 1) * 0.00037
    assert torch.allclose(files.read("a.weight").double(), exactly, rtol=2.0**-22, atol=0)


PACKED, SCALE = torch.full((8, 16), 0x42).to(torch.uint8), torch.full((8, 2), 56).to(torch.uint8).view(FP8)
NO_NUMBER = torch.full((8, 2), 127).to(torch.uint8).view(FP8)
GROUPS_OF_32 = {"a": {"weights": {"num_bits": 4, "type": "float", "group_size": 32}}}
REFUSED: list[tuple[str, dict[str, Tensor], dict[str, object], str]] = [
    ("nvfp4", matrix("nvfp4", PACKED, NO_NUMBER, 1), {}, "a.weight_scale holds a scale that is no number"),
    ("nvfp4", matrix("nvfp4", PACKED, SCALE[:, :1].contiguous(), 1), {}, "a.weight_scale has shape [8, 1]"),
    ("nvfp4", matrix("nvfp4", PACKED, SCALE.float(), 1), {}, "a.weight_scale is F32"),
    ("nvfp4", matrix("nvfp4", PACKED[:, :12].contiguous(), SCALE, 1), {}, "24 inputs, which groups of 16 do not"),
    ("nvfp4", matrix("nvfp4", PACKED, SCALE, 1) | {"a.weight_global_scale": torch.ones(2)}, {}, "asks for []"),
    ("nvfp4", matrix("nvfp4", PACKED, SCALE, float("inf")), {}, "weight_global_scale is 0, but must be above 0"),
    ("nvfp4-modelopt", matrix("nvfp4-modelopt", PACKED, SCALE, -1), {}, "weight_scale_2 is -1, but must be above 0"),
    ("nvfp4-modelopt", matrix("nvfp4-modelopt", PACKED, SCALE, float("nan")), {}, "weight_scale_2 holds a scale that"),
    ("nvfp4-modelopt", {"a.weight": PACKED, "a.weight_scale": SCALE}, {}, "lack the tensor a.weight_scale_2"),
    ("nvfp4-modelopt", {"a.weight": PACKED.float()}, {}, "says ModelOpt, NVFP4, but no tensor's"),
    ("nvfp4-modelopt", matrix("nvfp4-modelopt", PACKED, SCALE, 1), {"group_size": 32}, "NVFP4 in groups of 32"),
    ("nvfp4-modelopt", matrix("nvfp4-modelopt", PACKED, SCALE, 1), {"quant_algo": "W4A8_AWQ"}, "modelopt W4A8_AWQ"),
    ("nvfp4-modelopt", matrix("nvfp4-modelopt", PACKED, SCALE, 1), {"ignore": ["a"]}, "says that a is not"),
    ("nvfp4", matrix("nvfp4", PACKED, SCALE, 1), {"config_groups": GROUPS_OF_32}, "float weights in groups of 32"),
]


@pytest.mark.parametrize(("dialect", "tensors", "changes", "said"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(
    dialect: str, tensors: dict[str, Tensor], changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFilesError, match=re.escape(said)):
        opened(saved(tmp_path, dialect, tensors, **changes)).read("a.weight")


@pytest.fixture
def packed_model(tiny_llama: Any, tmp_path: Path) -> Callable[[str], Path]:
    def save(dialect: str) -> Path:
        tiny_llama.save_pretrained(tmp_path / "model")
        write_packed(tmp_path / "model", tmp_path / dialect, FORMS[dialect], 16)
        return tmp_path / dialect

    return save


@both_dialects
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_cpu_upcasts_it_and_says_so(
    dialect: str, dtype: str, packed_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = load_model(packed_model(dialect), dtype, CPU, Parallel())
    assert model.quantised_types == set()
    assert re.search("weights: (ModelOpt|compressed-tensors), NVFP4, upcast to ", caplog.text)


@both_dialects
def test_a_gpu_with_fp8_gemms_holds_it_in_fp8(
    dialect: str,
    packed_model: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is chosen there; the matrices are those of ``--quantization fp8``."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(loader, "fp8_unsupported_reason", lambda _device, _dtype: None)
    checkpoint = open_checkpoint(packed_model(dialect))
    formats = loader._formats(checkpoint, "auto", torch.bfloat16, torch.device("cuda"), quantises=False)
    assert formats == [FP8_ON_LOAD]
    assert "NVFP4, upcast to FP8 with a scale an output" in caplog.text
    monkeypatch.setattr(loader, "fp8_unsupported_reason", lambda _device, _dtype: "it is too old")
    assert loader._formats(checkpoint, "auto", torch.bfloat16, torch.device("cuda"), quantises=False) == []
    assert "NVFP4, upcast to bfloat16: it is too old" in caplog.text
