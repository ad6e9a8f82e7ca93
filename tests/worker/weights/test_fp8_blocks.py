"""FP8 checkpoints with a scale for each block are de-quantised exactly."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plait_worker.errors import ModelFilesError
from plait_worker.models.loader import load_model
from plait_worker.parallel import Parallel
from plait_worker.weights.formats.fp8_blocks import Fp8Blocks
from plait_worker.weights.reader import Weights
from plait_worker.weights.safetensors_folder import SafetensorsFolder
from torch import Tensor

CPU = torch.device("cpu")
BLOCK = Fp8Blocks(24, 40)
STATED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 40]}
MATRIX = "model.layers.1.mlp.up_proj.weight"


def quantise(weight: Tensor, block: Fp8Blocks) -> tuple[Tensor, Tensor]:
    """FP8 numbers and scales such that the largest of each block is FP8's largest."""
    num_rows, num_columns = block.num_blocks(weight.shape)
    scale = torch.empty(num_rows, num_columns)
    stored = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(num_rows):
        for j in range(num_columns):
            here = (
                slice(i * block.rows, (i + 1) * block.rows),
                slice(j * block.columns, (j + 1) * block.columns),
            )
            scale[i, j] = weight[here].abs().max() / 448
            stored[here] = (weight[here] / scale[i, j]).to(torch.float8_e4m3fn)
    return stored, scale


def exactly(stored: Tensor, scale: Tensor, block: Fp8Blocks) -> Tensor:
    """What the numbers mean, number by number in float64."""
    out = torch.empty(stored.shape, dtype=torch.float64)
    for i in range(stored.shape[0]):
        for j in range(stored.shape[1]):
            out[i, j] = float(stored[i, j].double()) * float(scale[i // block.rows, j // block.columns].double())
    return out


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 19), st.integers(1, 19)),
    block=st.builds(Fp8Blocks, st.integers(1, 21), st.integers(1, 21)),
    kind=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e8m0fnu]),
    seed=st.integers(0, 100),
)
def test_each_number_is_multiplied_by_the_scale_of_its_block(
    shape: tuple[int, int], block: Fp8Blocks, kind: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    stored = (torch.randn(shape, generator=generator) * 100).to(torch.float8_e4m3fn)
    scale = torch.rand(block.num_blocks(shape), generator=generator).add(0.01).to(kind)
    assert torch.equal(block.dequantise(stored, scale), exactly(stored, scale, block).float())


def test_blocks_of_128_reach_over_the_edges_of_a_latent_projection() -> None:
    weight = torch.randn(576, 300, generator=torch.Generator().manual_seed(0))
    block = Fp8Blocks(128, 128)
    stored, scale = quantise(weight, block)
    assert scale.shape == (5, 3)
    read = block.dequantise(stored, scale)
    # e4m3 keeps three bits of a fraction: half of the last is 1/16 of the number at most.
    assert ((read - weight).abs() <= weight.abs() / 16 + scale.max() / 512).all()
    assert torch.equal(read[512:, 256:], (stored[512:, 256:].double() * scale[4, 2].double()).float())


@pytest.fixture
def quantised(tiny_llama: Any, tmp_path: Path) -> Path:
    """A folder whose blocks' matrices are FP8, as the makers of such files leave embedding and head alone."""
    tiny_llama.save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantise(tensors[name], BLOCK)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    state(tmp_path, STATED)
    return tmp_path


def state(path: Path, quantisation: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantisation}))


def load(path: Path) -> Any:
    return load_model(path, "float32", CPU, Parallel())


def test_a_quantised_folder_is_read_as_float32(quantised: Path) -> None:
    folder = SafetensorsFolder(quantised)
    stored = safetensors.torch.load_file(quantised / "model.safetensors")
    assert folder.names == {name for name in stored if not name.endswith("_scale_inv")}
    assert torch.equal(folder.read(MATRIX), exactly(stored[MATRIX], stored[f"{MATRIX}_scale_inv"], BLOCK).float())
    assert torch.equal(folder.read("model.norm.weight"), stored["model.norm.weight"])
    model = load(quantised)
    assert model.weight_bytes == 4 * sum(t.numel() for name, t in stored.items() if "scale" not in name)


def test_a_rank_gets_its_part_of_a_quantised_matrix(quantised: Path) -> None:
    folder = SafetensorsFolder(quantised)
    weights = Weights(folder, torch.bfloat16, CPU)
    whole = folder.read(MATRIX).bfloat16()
    assert torch.equal(weights.take(MATRIX, (96, 64), rows=range(30, 60)), whole[30:60])
    assert torch.equal(weights.take(MATRIX, (96, 64), columns=range(10, 50)), whole[:, 10:50])


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.pop(f"{MATRIX}_scale_inv"), f"lack the tensor {MATRIX}_scale_inv"),
        (
            lambda t: t.update({f"{MATRIX}_scale_inv": torch.ones(4, 3)}),
            r"are \[4, 3\], but blocks of \[24, 40\] \(weight_block_size or .*\) ask for \[4, 2\]",
        ),
        (
            lambda t: t.update({f"{MATRIX}_scale": t.pop(f"{MATRIX}_scale_inv")}),
            f"hold {MATRIX}_scale, but .* of FP8 by other quant_methods, or by fp8 without weight_block_size",
        ),
        (lambda t: t.update({f"{MATRIX}_scale_inv": torch.ones(4, 2).int()}), "_scale_inv is I32"),
        (lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(1)}), "norm.weight_scale_inv"),
        (
            lambda t: t.update(
                {
                    "model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn),
                    "model.norm.weight_scale_inv": torch.ones(1),
                }
            ),
            r"model.norm.weight cannot be de-quantised: its shape is \[64\]",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    edit: Callable[[dict[str, Tensor]], object], said: str, quantised: Path
) -> None:
    tensors = safetensors.torch.load_file(quantised / "model.safetensors")
    edit(tensors)
    safetensors.torch.save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(ModelFilesError, match=said):
        load(quantised)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"weight_block_size": None},
            r"weight_scale_inv, .* of FP8 blocks, which quant_method fp8 and weight_block_size",
        ),
        ({"weight_block_size": [24, 20]}, r"are \[.*\], but blocks of \[24, 20\] \(weight_block_size or "),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "of FP8 blocks, which quant_method fp8 and weight_block"),
        ({"weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\], but must be two whole"),
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\], but must be two"),
        ({"fmt": "e5m2"}, "fp8 of format e5m2"),
        ({"activation_scheme": "static"}, "stored scales of activations"),
        ({"quant_method": "quark"}, "quantisation quark is not supported"),
    ],
)
def test_other_quantisations_are_refused_by_name(changes: dict[str, Any], said: str, quantised: Path) -> None:
    state(quantised, STATED | changes)
    with pytest.raises(ModelFilesError, match=said):
        load(quantised)


def test_fp8_tensors_that_the_configuration_does_not_mention_are_refused(quantised: Path) -> None:
    state(quantised, None)
    with pytest.raises(
        ModelFilesError, match="weight_scale_inv, but quantization_config asks for other scales, or none"
    ):
        load(quantised)
