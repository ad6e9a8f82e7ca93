"""FP8 matrices that stay FP8: each form against what its numbers mean in float64, by the plain references on a CPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from plait_kernels.linear import Fp8Matrix, Fp8Weight, RowNorm, quantise_rows, rmsnorm_quantise, silu_mul_quantise
from plait_kernels.linear.fp8 import FP8, GROUP, join, quantise_blocks, quantise_outputs
from plait_kernels.linear.fp8_matrix import fp8_unsupported_reason
from plait_kernels.moe import stack_fp8
from plait_worker.errors import ModelFilesError, WorkerError
from plait_worker.models import loader
from plait_worker.parallel import Parallel
from plait_worker.weights.safetensors_folder import SafetensorsFolder
from torch import Tensor

CPU = torch.device("cpu")
SHAPES = [(128, 128), (192, 320), (576, 208), (16, 16), (48, 1408)]
KINDS: dict[str, Callable[[Tensor], Fp8Weight]] = {"outputs": quantise_outputs, "blocks": quantise_blocks}
PROJECTION = "model.layers.1.mlp.up_proj.weight"
Edit = Callable[[dict[str, Tensor]], object]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def exactly(weight: Fp8Weight) -> Tensor:
    """float64: number by number, by the scale of its output or of the block it lies in."""
    stored = weight.stored_OI.double()
    for output in range(stored.shape[0]):
        for group in range(-(-stored.shape[1] // GROUP)):
            at = (output // weight.block_rows, group) if weight.block_rows else (output,)
            stored[output, group * GROUP : (group + 1) * GROUP] *= float(weight.scale[at])
    return stored


def rounded_rows(x_NI: Tensor, *, is_grouped: bool) -> Tensor:
    """float64: what rows become, element by element."""
    out, size = x_NI.double().clone(), GROUP if is_grouped else x_NI.shape[1]
    for row in out:
        for part in row.split(size):
            largest = part.abs().max()
            if largest > 0:
                part.copy_((part * 448 / largest).float().to(FP8).double() * largest / 448)
    return out


def off_by(given: Tensor, right: Tensor) -> float:
    return float((given.double() - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gemm_is_that_of_the_rounded_rows_and_the_scaled_weights(kind: str, shape: tuple[int, int]) -> None:
    weight = KINDS[kind](torch.randn(shape))
    matrix = Fp8Matrix(weight, bias_O=None)
    for num_rows in (2, 65):
        x_NI = torch.randn(num_rows, shape[1]).bfloat16()
        rows_NI = quantise_rows(x_NI, is_grouped=kind == "blocks").dequantised()
        assert off_by(matrix(x_NI), rows_NI.double() @ exactly(weight).T) < 2**-8
    row = torch.randn(1, shape[1]).bfloat16()
    assert off_by(matrix(row), row.double() @ exactly(weight).T) < 2**-8, "one row is not rounded to FP8"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_rounded_to_the_nearest_with_the_scale_of_their_largest(kind: str) -> None:
    is_grouped = kind == "blocks"
    x_NI = torch.randn(9, 320).bfloat16()
    given, right = quantise_rows(x_NI, is_grouped=is_grouped).dequantised(), rounded_rows(x_NI, is_grouped=is_grouped)
    # A number half way between two falls to either.
    assert ((given - x_NI).abs() <= (right - x_NI).abs() * 1.001).all()
    assert (given == right.float()).float().mean() > 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_norm_and_gate_before_a_gemm_give_what_they_give_apart(kind: str) -> None:
    is_grouped = kind == "blocks"
    x, residual, weight = torch.randn(5, 256), torch.randn(5, 256), torch.randn(256)
    rows, total = rmsnorm_quantise(x, RowNorm(residual, weight, 1e-6), is_grouped=is_grouped)
    assert torch.equal(total, x + residual)
    normed = torch.nn.functional.rms_norm(total.double(), (256,), weight.double(), 1e-6)
    assert off_by(rows.dequantised(), rounded_rows(normed, is_grouped=is_grouped)) < 2**-4
    gate, up = x.double().chunk(2, dim=1)
    gated = torch.nn.functional.silu(gate) * up
    rows = silu_mul_quantise(x, is_grouped=is_grouped)
    assert off_by(rows.dequantised(), rounded_rows(gated, is_grouped=is_grouped)) < 2**-4


def test_a_row_of_zeros_stays_zeros_and_one_with_a_nan_spoils_no_other() -> None:
    x = torch.randn(3, 256)
    x[0], x[1, 5] = 0, float("nan")
    for is_grouped in (False, True):
        given = quantise_rows(x, is_grouped=is_grouped).dequantised()
        assert not given[0].any()
        assert given[1].isnan().any()
        assert given[2].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_cut_anywhere_between_outputs_keeps_its_values(kind: str) -> None:
    weight = KINDS[kind](torch.randn(384, 256))
    whole = exactly(weight)
    for rows in (range(128), range(128, 384), range(64, 192), range(96, 208)):
        assert torch.equal(exactly(weight.rows(rows)), whole[rows.start : rows.stop])
    parts = [weight.rows(range(192)), weight.rows(range(192, 384))]
    joined = join(parts)
    assert joined is not None
    assert torch.equal(exactly(joined), whole)


@pytest.mark.parametrize("largest", [0.0, 1e-40, 1e-37, 1e-36, 2e-36])
@pytest.mark.parametrize("is_grouped", [False, True])
def test_rows_of_tiny_values_stay_finite(largest: float, is_grouped: bool) -> None:
    x_NI = torch.zeros(2, 256)
    x_NI[0, 3], x_NI[1, 200] = largest, -1.0
    rows_NI = quantise_rows(x_NI, is_grouped=is_grouped).dequantised()
    assert torch.allclose(rows_NI, x_NI, rtol=2**-4, atol=2.0**-119)


def test_inputs_are_cut_between_blocks_and_nowhere_else() -> None:
    weight = quantise_blocks(torch.randn(128, 384))
    half = weight.columns(range(128, 384))
    assert half is not None
    assert torch.equal(exactly(half), exactly(weight)[:, 128:])
    assert weight.columns(range(192)) is None
    of_outputs = quantise_outputs(torch.randn(128, 384)).columns(range(192))
    assert of_outputs is not None
    assert of_outputs.shape == (128, 192)


def test_matrices_of_two_kinds_are_not_joined() -> None:
    assert join([quantise_blocks(torch.randn(128, 128)), quantise_outputs(torch.randn(128, 128))]) is None


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_the_weighted_sum_of_their_mlps(kind: str) -> None:
    hidden, width, num = 256, 96, 4
    made = []
    for _ in range(num):
        gate_up = join([KINDS[kind](torch.randn(width, hidden) * 0.1) for _ in range(2)])
        assert gate_up is not None
        made.append((gate_up, KINDS[kind](torch.randn(hidden, width) * 0.1)))
    x, weights = torch.randn(7, hidden).bfloat16(), torch.rand(7, 2)
    chosen = torch.stack([torch.randperm(num)[:2] for _ in range(7)])
    right = torch.zeros(7, hidden, dtype=torch.float64)
    for token, choice in ((token, choice) for token in range(7) for choice in range(2)):
        gate_up, down = made[int(chosen[token, choice])]
        row = rounded_rows(x[token : token + 1], is_grouped=kind == "blocks")
        gate, up = (row @ exactly(gate_up).T).chunk(2, dim=1)
        gated = rounded_rows(torch.nn.functional.silu(gate) * up, is_grouped=kind == "blocks")
        right[token] += float(weights[token, choice]) * (gated @ exactly(down).T)[0]
    assert off_by(stack_fp8(made)(x, weights, chosen), right) < 2**-4, "but for numbers half way between two"


def test_experts_of_two_kinds_are_refused() -> None:
    gate_up, down = quantise_blocks(torch.randn(256, 128)), quantise_outputs(torch.randn(128, 128))
    with pytest.raises(ValueError, match="scales of blocks and of outputs"):
        stack_fp8([(gate_up, down)])


def of_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    made = quantise_blocks(weight)
    return made.stored_OI, made.scale


def of_outputs(weight: Tensor) -> tuple[Tensor, Tensor]:
    made = quantise_outputs(weight)
    return made.stored_OI, made.scale[:, None]


def of_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().max() / 448
    return (weight / scale).to(FP8), scale


def compressed(strategy: str, **more: object) -> dict[str, object]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **more}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


FORMS: dict[str, tuple[dict[str, object], str, Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "blocks of DeepSeek and Qwen": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        "_scale_inv",
        of_blocks,
    ),
    "a scale a tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, "_scale", of_tensor),
    "compressed-tensors, channel": (compressed("channel"), "_scale", of_outputs),
    "compressed-tensors, tensor": (compressed("tensor"), "_scale", of_tensor),
    "compressed-tensors, block": (compressed("block", block_structure=[128, 128]), "_scale", of_blocks),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", of_tensor),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tiny_llama: Any, tmp_path: Path, form: str) -> Path:
    return save(tiny_llama, tmp_path, form)


def save(model: Any, path: Path, form: str) -> Path:
    """The model with the projections of its layers in FP8, and stray scales that such files have."""
    stated, ending, quantise = FORMS[form]
    model.save_pretrained(path)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[name + ending] = quantise(tensors[name].float())
        tensors[name.replace(".weight", ".input_scale")] = torch.ones(())
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(())
    safetensors.torch.save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    return path


@pytest.fixture
def has_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The references, as if this were a GPU with FP8."""
    monkeypatch.setattr(loader, "fp8_unsupported_reason", lambda _device, _dtype: None)
    monkeypatch.setattr(loader, "choose_dtype", lambda _name, _device: torch.bfloat16)


def fp8_matrices(model: Any) -> Iterator[Fp8Matrix]:
    for block in model.blocks:
        for layer in (block.attention.qkv, block.attention.output, block.mlp.gate_up, block.mlp.down):
            if isinstance(layer.multiply, Fp8Matrix):
                yield layer.multiply


@pytest.mark.usefixtures("has_fp8")
def test_every_form_of_files_stays_fp8_with_the_values_that_a_cpu_widens(folder: Path) -> None:
    model: Any = loader.load_model(folder, "auto", CPU, Parallel())
    held = list(fp8_matrices(model))
    assert len(held) == 4 * len(model.blocks)
    assert model.quantised_types == {"FP8"}
    files = SafetensorsFolder(folder)
    down = f"model.layers.{len(model.blocks) - 1}.mlp.down_proj.weight"
    assert torch.equal(held[-1].weight_OI.dequantised(), files.read(down))
    gate, up = (files.read(down.replace("down", name)) for name in ("gate", "up"))
    assert torch.equal(held[-2].weight_OI.dequantised(), torch.cat((gate, up)))
    assert not isinstance(model.head.multiply, Fp8Matrix)


def test_a_cpu_widens_every_form(folder: Path, form: str) -> None:
    model = loader.load_model(folder, "float32", CPU, Parallel())
    assert not list(fp8_matrices(model)), form


@pytest.mark.usefixtures("has_fp8")
def test_sixteen_bit_files_become_fp8_as_they_are_read(tiny_llama: Any, tmp_path: Path) -> None:
    tiny_llama.save_pretrained(tmp_path)
    model: Any = loader.load_model(tmp_path, "auto", CPU, Parallel(), quantises=True)
    held = list(fp8_matrices(model))
    assert len(held) == 4 * len(model.blocks)
    down = safetensors.torch.load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(held[3].weight_OI.dequantised(), quantise_outputs(down.bfloat16()).dequantised())
    taken = sum(matrix.weight_OI.nbytes for matrix in held)
    rest = 2 * sum(t.numel() for name, t in tiny_llama.state_dict().items() if not name.endswith("_proj.weight"))
    assert taken < model.weight_bytes <= taken + rest


@pytest.mark.usefixtures("has_fp8")
def test_an_explicit_dtype_widens_what_the_files_have_in_fp8_and_says_so(
    tiny_llama: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(tiny_llama, tmp_path, "modelopt")
    with caplog.at_level("INFO"):
        assert not list(fp8_matrices(loader.load_model(folder, "bfloat16", CPU, Parallel())))
    assert "quantised, upcast to bfloat16: --dtype says so" in caplog.text


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_files_in_fp8_are_refused_too_where_quantising_cannot_be(dtype: str, tiny_llama: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--quantization fp8 cannot hold weights in FP8 here"):
        loader.load_model(save(tiny_llama, tmp_path, "modelopt"), dtype, CPU, Parallel(), quantises=True)


def test_quantising_needs_a_gpu_that_multiplies_fp8(tiny_llama: Any, tmp_path: Path) -> None:
    tiny_llama.save_pretrained(tmp_path)
    reason = fp8_unsupported_reason(CPU, torch.bfloat16)
    assert reason is not None
    with pytest.raises(ValueError, match=r"--quantization fp8 cannot hold weights in FP8 here: .*leave it out"):
        loader.load_model(tmp_path, "bfloat16", CPU, Parallel(), quantises=True)
    with pytest.raises(ValueError, match="--quantization fp8 cannot"):
        loader.dummy_model(tmp_path, "bfloat16", CPU, Parallel(), quantises=True)


def spoil(name: str, value: float) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[0] = value

    return edit


@pytest.mark.parametrize("form", ["compressed-tensors, channel"])
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (spoil(f"{PROJECTION}_scale", float("nan")), f"{PROJECTION}_scale holds a scale that is no number"),
        (spoil(f"{PROJECTION}_scale", float("inf")), f"{PROJECTION}_scale holds a scale that is no number"),
        (lambda t: t.update({f"{PROJECTION}_scale": torch.ones(3, 1)}), r"its scales are \[3, 1\]; one, or one for"),
        (lambda t: t.pop(f"{PROJECTION}_scale"), f"lack the tensor {PROJECTION}_scale"),
        (lambda t: t.update({f"{PROJECTION}_scale": torch.ones(1).int()}), "_scale is I32"),
    ],
)
@pytest.mark.usefixtures("has_fp8")
def test_scales_that_do_not_fit_are_refused_by_name(edit: Edit, said: str, folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    edit(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    for dtype in ("auto", "float32"):
        with pytest.raises(ModelFilesError, match=said):
            loader.load_model(folder, dtype, CPU, Parallel())


@pytest.mark.parametrize("form", ["modelopt"])
@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt W4A8_AWQ"),
        (compressed("group"), "8-bit float weights, strategy group"),
        (compressed("channel", num_bits=4, type="int"), "4-bit int weights"),
        (compressed("block"), "block_structure is None, but must be two whole numbers"),
        (compressed("channel") | {"format": "int-quantized"}, "compressed-tensors of format int-quantized"),
        (compressed("channel") | {"config_groups": {}}, "in 0 groups"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "fp8 with activation_scheme odd"),
        ({"quant_method": "quark"}, "quantisation quark is not supported"),
    ],
)
def test_a_scheme_that_is_not_known_is_refused_by_name(stated: dict[str, object], said: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    with pytest.raises(ModelFilesError, match=re.escape(said)):
        loader.load_model(folder, "auto", CPU, Parallel())


@pytest.mark.parametrize("form", ["compressed-tensors, channel"])
def test_a_gpu_of_another_generation_widens_fp8_and_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 9))
    reason = fp8_unsupported_reason(torch.device("cuda"), torch.bfloat16)
    assert reason == "the GPU has compute capability 8.9, and their kernels are for 9.0"
    monkeypatch.setattr(loader, "fp8_unsupported_reason", lambda _device, _dtype: reason)
    monkeypatch.setattr(loader, "choose_dtype", lambda _name, _device: torch.bfloat16)
    caplog.set_level("INFO")
    model: Any = loader.load_model(folder, "auto", CPU, Parallel())
    assert not list(fp8_matrices(model))
    assert model.quantised_types == frozenset()
    assert f"FP8 weights are upcast to bfloat16: {reason}" in caplog.text


@pytest.mark.parametrize("form", ["compressed-tensors, channel"])
@pytest.mark.usefixtures("has_fp8")
def test_memory_must_hold_fp8_as_it_is_held_which_is_told_before_a_matrix_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    with monkeypatch.context() as counting:
        counting.setattr(loader, "check_fits", lambda taken, _free: counted.append(taken))
        model: Any = loader.load_model(folder, "auto", CPU, Parallel(), free_bytes=1)
    needed = max(counted)
    dense = 2 * sum(stored.numel() for stored in safetensors.torch.load_file(folder / "model.safetensors").values())
    assert model.weight_bytes <= needed < dense
    loader.load_model(folder, "auto", CPU, Parallel(), free_bytes=needed)
    monkeypatch.setattr(SafetensorsFolder, "fp8_weight", lambda _files, name: pytest.fail(f"{name} was read"))
    monkeypatch.setattr(SafetensorsFolder, "read", lambda _files, name: pytest.fail(f"{name} was read"))
    with pytest.raises(WorkerError, match="too little"):
        loader.load_model(folder, "auto", CPU, Parallel(), free_bytes=int(0.9 * needed))
