"""AWQ, GPTQ and compressed-tensors files mean what their definitions say, dense, in blocks and cut for ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from plait_testing.packed_models import (
    FORMS,
    QUANTISED,
    Form,
    dense_twin,
    pack,
    quantise,
    stated,
    tensors_of,
    write_packed,
)
from plait_worker.errors import ModelFilesError
from plait_worker.models.loader import load_model, open_checkpoint
from plait_worker.parallel import Parallel, Shard
from plait_worker.weights.formats.blocks import BLOCKS
from plait_worker.weights.packed.folder import PackedFolder
from plait_worker.weights.reader import MatrixShard, Weights
from plait_worker.weights.safetensors_folder import SafetensorsFolder
from torch import Tensor

CPU = torch.device("cpu")
MODULE = "model.layers.1.mlp.up_proj"
BLOCK_KINDS = {
    "awq": "Q5_0",
    "gptq": "Q4_0",
    "gptq-zeros": "Q5_0",
    "gptq-v2-zeros": "Q5_0",
    "gptq-8": "Q8_0",
    "compressed": "Q4_0",
    "compressed-zeros": "Q5_0",
    "compressed-8": "Q8_0",
    "mxfp4": "Q5_0",
}
Edit = Callable[[dict[str, Tensor]], object]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def save_matrices(path: Path, form: Form, group_size: int, matrices: dict[str, Tensor]) -> dict[str, Tensor]:
    """A folder that holds nothing else; what its matrices mean, in float64."""
    made = {module: quantise(weight, form, group_size) for module, weight in matrices.items()}
    tensors = {name: t for module, each in made.items() for name, t in tensors_of(module, each, form).items()}
    safetensors.torch.save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": stated(form, group_size)}))
    return {f"{module}.weight": each.exactly() for module, each in made.items()}


def opened(path: Path) -> PackedFolder:
    folder = SafetensorsFolder(path)
    assert folder.packed is not None
    return PackedFolder(folder, folder.packed)


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_and_group_size_means_what_its_definition_says(form: str, group_size: int, tmp_path: Path) -> None:
    matrices = {"a": torch.randn(40, 256), "b": torch.randn(520, 384) * 0.02}
    meant = save_matrices(tmp_path, FORMS[form], group_size, matrices)
    files = opened(tmp_path)
    assert files.names == meant.keys()
    for name, exactly in meant.items():
        assert files.shape(name) == tuple(exactly.shape)
        assert torch.equal(files.read(name), exactly.float())


@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("form", BLOCK_KINDS)
def test_blocks_hold_the_same_values_exactly(form: str, group_size: int, tmp_path: Path) -> None:
    meant = save_matrices(tmp_path, FORMS[form], group_size, {"a": torch.randn(520, 256)})
    files = opened(tmp_path)
    weight = files.block_weight("a.weight")
    assert weight is not None
    assert weight.kind == BLOCK_KINDS[form]
    assert torch.equal(weight.dequantised(), meant["a.weight"].float())
    assert files.block_kind("a.weight") == weight.kind


@pytest.mark.parametrize(("form", "group_size"), [("gptq-act-order", 64), ("gptq-8-zeros", 64), ("awq", 16)])
def test_what_no_blocks_hold_is_read_dense(form: str, group_size: int, tmp_path: Path) -> None:
    save_matrices(tmp_path, FORMS[form], group_size, {"a": torch.randn(64, 256)})
    files = opened(tmp_path)
    assert files.block_weight("a.weight") is None
    assert files.block_kind("a.weight") is None


@pytest.mark.parametrize("form", ["compressed", "compressed-zeros", "compressed-8"])
@pytest.mark.parametrize("shape", [(7, 37), (9, 64), (1, 3)])
def test_sides_that_do_not_fill_words_are_read(form: str, shape: tuple[int, int], tmp_path: Path) -> None:
    meant = save_matrices(tmp_path, FORMS[form], -1, {"a": torch.randn(shape)})
    assert torch.equal(opened(tmp_path).read("a.weight"), meant["a.weight"].float())


def test_zeros_of_the_first_gptq_files_are_stored_less_one(tmp_path: Path) -> None:
    """One is subtracted from the word of zeros 0, 5, 8, 8, ...: the zero of 0 borrows from its neighbour."""
    tensors = {
        "a.qweight": torch.full((1, 8), 0xBA987654 - (1 << 32)).int(),
        "a.qzeros": torch.tensor([[0x88888850 - 0x11111111]]).int(),
        "a.scales": torch.ones(1, 8).half(),
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stated(FORMS["gptq-zeros"], -1)}))
    read = opened(tmp_path).read("a.weight")
    assert read[0].tolist() == list(range(4, 12))
    assert read[1].tolist() == list(range(-1, 7))
    assert read[2].tolist() == list(range(-4, 4))


@pytest.mark.parametrize("form", ["gptq-zeros", "gptq-v2-zeros", "gptq-zeros-act-order"])
def test_zeros_of_the_other_gptq_version_are_refused(form: str, tmp_path: Path) -> None:
    """By their values: also where every tenth zero is 0."""
    forms = FORMS | {"gptq-zeros-act-order": Form("gptq", is_symmetric=False, is_act_order=True)}
    positive = torch.rand(6, 256)
    matrices = {name: torch.cat((torch.randn(58, 256) * 0.3, positive)) for name in ("a", "b")}
    save_matrices(tmp_path, forms[form], 64, matrices)
    opened(tmp_path)
    config = stated(forms[form], 64)
    said, other = ("gptq", "gptq_v2") if config["checkpoint_format"] == "gptq_v2" else ("gptq_v2", "gptq")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config | {"checkpoint_format": said}}))
    with pytest.raises(ModelFilesError, match=f"not of checkpoint_format {said}: .* to {other},"):
        opened(tmp_path)


def test_symmetric_gptq_files_mean_the_same_in_either_version(tmp_path: Path) -> None:
    meant = save_matrices(tmp_path, FORMS["gptq"], 64, {"a": torch.randn(40, 256)})["a.weight"]
    for version in ("gptq", "gptq_v2"):
        config = stated(FORMS["gptq"], 64) | {"checkpoint_format": version}
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        assert torch.equal(opened(tmp_path).read("a.weight"), meant.float())


@pytest.mark.parametrize(
    ("smallest", "dtype", "is_kept"),
    [
        (2.0**-17, torch.bfloat16, True),
        (1.5 * 2.0**-24, torch.bfloat16, False),
        (2.0**-30, torch.bfloat16, False),
        (1e-4, torch.float32, True),
        (1.7e-5, torch.float32, False),
    ],
)
def test_scales_that_float16_would_lose_are_kept_by_dense_weights(
    smallest: float, dtype: torch.dtype, is_kept: bool, tmp_path: Path
) -> None:
    made = quantise(torch.randn(64, 128), FORMS["compressed"], 32)
    scale_OG = made.scale_OG.to(dtype)
    scale_OG[3, 1] = smallest
    stored = tensors_of("a", made, FORMS["compressed"]) | {"a.weight_scale": scale_OG}
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stated(FORMS["compressed"], 32)}))
    files, meant = opened(tmp_path), ((made.quant_OI - 8) * scale_OG.double()[:, made.group_I]).float()
    assert torch.equal(files.read("a.weight"), meant)
    weight = files.block_weight("a.weight")
    assert (weight is not None) == (files.block_kind("a.weight") is not None) == is_kept
    if weight is not None:
        error = (weight.dequantised() - meant).abs()
        assert (error <= meant.abs() * (2.0**-11 if dtype == torch.float32 else 0)).all()


def test_experts_of_a_layer_are_held_alike(tmp_path: Path) -> None:
    """One that was not quantised, or whose scales float16 would lose, makes its layer's dense."""
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(3) for expert in range(2)]
    meant = save_matrices(tmp_path, FORMS["compressed"], 32, {name: torch.randn(64, 128) for name in names})
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for ending in ("packed", "scale", "shape"):
        tensors.pop(f"{names[3]}.weight_{ending}")
    tensors[f"{names[3]}.weight"] = meant[f"{names[3]}.weight"].bfloat16()
    tensors[f"{names[5]}.weight_scale"] = torch.full((64, 4), 2.0**-30).bfloat16()
    safetensors.torch.save_file(tensors, file)
    files = opened(tmp_path)
    assert [files.block_weight(f"{name}.weight") is not None for name in names] == [True, True, *[False] * 4]


def test_awq_words_hold_eight_outputs_in_its_own_order(tmp_path: Path) -> None:
    tensors = {
        "a.qweight": torch.tensor([[0x76543210]]).int(),
        "a.qzeros": torch.zeros(1, 1).int(),
        "a.scales": torch.ones(1, 8).half(),
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stated(FORMS["awq"], -1)}))
    assert opened(tmp_path).read("a.weight").flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_zeros_of_compressed_tensors_may_be_bytes(tmp_path: Path) -> None:
    made = quantise(torch.randn(9, 64), FORMS["compressed-zeros"], 32)
    tensors = tensors_of("a", made, FORMS["compressed-zeros"]) | {"a.weight_zero_point": (made.zero_OG - 8).char()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stated(FORMS["compressed-zeros"], 32)}))
    assert torch.equal(opened(tmp_path).read("a.weight"), made.exactly().float())


def test_each_matrix_has_the_scheme_that_its_tensors_fit(tmp_path: Path) -> None:
    """A mixed checkpoint: groups of the configuration are told apart by the shapes."""
    forms = {"a": (Form("compressed-tensors", 8), -1), "b": (FORMS["compressed"], 32), "c": (FORMS["compressed"], 64)}
    made = {module: quantise(torch.randn(48, 128), *each) for module, each in forms.items()}
    tensors = {name: t for module in made for name, t in tensors_of(module, made[module], forms[module][0]).items()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    groups = {module: stated(*each)["config_groups"]["group_0"] for module, each in forms.items()}  # type: ignore[index]
    config = stated(*forms["a"]) | {"config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    files = opened(tmp_path)
    assert all(torch.equal(files.read(f"{module}.weight"), made[module].exactly().float()) for module in made)


@pytest.mark.parametrize("form", ["awq", "gptq", "gptq-act-order", "compressed-zeros"])
def test_ranks_cut_between_blocks_or_get_dense_shards(form: str, tmp_path: Path) -> None:
    meant = save_matrices(tmp_path, FORMS[form], 64, {"a": torch.randn(96, 256)})["a.weight"]
    weights = Weights(opened(tmp_path), torch.float32, CPU, formats=[BLOCKS])
    for rows, columns in ((range(48), range(256)), (range(96), range(64, 160)), (range(96), range(100, 200))):
        shard = MatrixShard("a.weight", (96, 256), Shard(rows, 0), Shard(columns, 0))
        kept = BLOCKS.read(weights, shard)
        is_cut_between = form != "gptq-act-order" and columns.start % 32 == 0
        assert (kept is not None) == is_cut_between
        read = weights.take("a.weight", (96, 256), rows, columns) if kept is None else kept[0].dequantised()
        assert torch.equal(read, meant.float()[rows.start : rows.stop, columns.start : columns.stop])


@pytest.fixture
def saved(tiny_llama: Any, tmp_path: Path) -> Callable[[str], Path]:
    def save(form: str) -> Path:
        tiny_llama.save_pretrained(tmp_path / "model")
        write_packed(tmp_path / "model", tmp_path / form, FORMS[form], 32)
        return tmp_path / form

    return save


@pytest.mark.parametrize("form", BLOCK_KINDS)
def test_a_cpu_keeps_the_blocks_of_a_model(form: str, saved: Callable[[str], Path]) -> None:
    folder = saved(form)
    kept, upcast = load_model(folder, "auto", CPU, Parallel()), load_model(folder, "bfloat16", CPU, Parallel())
    twin = load_model(dense_twin(folder), "bfloat16", CPU, Parallel())
    assert kept.quantised_types == ({BLOCK_KINDS[form]} if kept.dtype == torch.bfloat16 else set())
    assert upcast.quantised_types == set()
    assert upcast.weight_bytes == twin.weight_bytes
    assert kept.weight_bytes < upcast.weight_bytes or kept.dtype != torch.bfloat16
    hidden = torch.randn(3, 64).bfloat16()
    for ours, theirs in zip(upcast.blocks, twin.blocks, strict=True):  # type: ignore[attr-defined]
        assert torch.equal(ours.mlp.gate_up.multiply(hidden), theirs.mlp.gate_up.multiply(hidden))


def test_zero_biases_that_no_layer_has_are_passed_over(saved: Callable[[str], Path]) -> None:
    folder = saved("gptq")
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file(tensors | {f"{MODULE}.bias": torch.zeros(96).half()}, file)
    load_model(folder, "auto", CPU, Parallel())
    safetensors.torch.save_file(tensors | {f"{MODULE}.bias": torch.ones(96).half()}, file)
    with pytest.raises(ModelFilesError, match=f"does not use \\({MODULE}.bias\\)"):
        load_model(folder, "auto", CPU, Parallel())


def spoil(name: str, value: float) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[0] = value

    return edit


TENSORS = [
    ("awq", spoil(f"{MODULE}.scales", float("nan")), "scales holds a scale that is no number"),
    ("gptq", spoil(f"{MODULE}.scales", float("inf")), "scales holds a scale that is no number"),
    ("compressed", spoil(f"{MODULE}.weight_scale", float("nan")), "weight_scale holds a scale that is no number"),
    ("awq", lambda t: t.update({f"{MODULE}.scales": torch.ones(3, 96).half()}), "asks for [2, 96]"),
    ("awq", lambda t: t.pop(f"{MODULE}.qzeros"), f"lack the tensor {MODULE}.qzeros"),
    ("awq", lambda t: t.update({f"{MODULE}.qweight": torch.ones(8).int()}), "has shape [8], but must be a matrix"),
    ("awq", lambda t: t.update({f"{MODULE}.qweight": torch.ones(64, 12)}), "qweight is F32"),
    ("gptq", lambda t: t.pop(f"{MODULE}.scales"), f"lack the tensor {MODULE}.scales"),
    ("gptq", spoil(f"{MODULE}.qzeros", 0), "zeros other than 8, but quantization_config says sym"),
    ("gptq", lambda t: t[f"{MODULE}.g_idx"].copy_(t[f"{MODULE}.g_idx"].flip(0)), "says desc_act false"),
    ("gptq-act-order", spoil(f"{MODULE}.g_idx", 2), "names groups 0 to 2, but there are 2"),
    ("gptq-act-order", lambda t: t.pop(f"{MODULE}.g_idx"), f"lack the tensor {MODULE}.g_idx"),
    ("compressed", spoil(f"{MODULE}.weight_shape", 95), "weight_shape says [95, 64]"),
    ("compressed", lambda t: t.pop(f"{MODULE}.weight_scale"), f"lack the tensor {MODULE}.weight_scale"),
    (
        "compressed",
        lambda t: t.update({f"{MODULE}.weight_zero_point": torch.ones(12, 2).int()}),
        "words for 64 inputs with zeros, which is none of what quantization_config says",
    ),
    ("compressed", lambda t: t.update({f"{MODULE}.weight_scale": torch.ones(96, 3)}), "asks for [96, 2]"),
    ("awq", lambda t: t.update({f"{MODULE}.weight": torch.ones(96, 64)}), f"hold {MODULE}.weight twice"),
    ("awq", lambda t: [t.pop(name) for name in list(t) if name.endswith("qweight")], "no tensor's name ends in"),
]


@pytest.mark.parametrize(("form", "edit", "said"), TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(
    form: str, edit: Edit, said: str, saved: Callable[[str], Path]
) -> None:
    file = saved(form) / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    edit(tensors)
    safetensors.torch.save_file(tensors, file)
    for dtype in ("auto", "float32"):
        with pytest.raises(ModelFilesError, match=re.escape(said)):
            load_model(file.parent, dtype, CPU, Parallel())


def of_weights(**more: object) -> dict[str, object]:
    config = stated(FORMS["compressed"], 32)
    group = config["config_groups"]["group_0"]  # type: ignore[index]
    return {"config_groups": {"group_0": group | {"weights": group["weights"] | more}}}


CONFIGS = [
    ("awq", {"version": "gemv"}, "awq of version gemv with 4 bits"),
    ("awq", {"bits": 3}, "awq of version gemm with 3 bits"),
    ("awq", {"zero_point": False}, "awq with zero_point false"),
    ("awq", {"group_size": 48}, "has 64 inputs, which groups of 48 do not divide"),
    ("awq", {"group_size": 64}, "asks for [1, 64]: the files do not belong together; correct group_size there"),
    ("awq", {"group_size": 0}, "group_size is 0, but must be a whole number from 1 to 4294967296, or -1: "),
    (
        "compressed",
        of_weights(group_size=-5),
        "group_size is -5, but must be a whole number from 1 to 4294967296, or -1",
    ),
    ("awq", {"modules_to_not_convert": ["up_proj"]}, "quantization_config says that model.layers.0.mlp.up_proj is not"),
    ("awq", {"quant_method": "bitsandbytes"}, "quantisation bitsandbytes is not supported; these are: AWQ"),
    ("awq", {"quant_method": "gptq"}, "not those of GPTQ, 4 bits, groups of 32, which quantization_config says"),
    ("gptq", {"quant_method": "awq"}, "not those of AWQ, 4 bits, groups of 32, which quantization_config says"),
    ("gptq", {"bits": 3}, "gptq with 3 bits"),
    ("gptq", {"bits": 8}, "not those of GPTQ, 8 bits, groups of 32, which quantization_config says"),
    ("gptq", {"bits": 8, "group_size": -1}, "correct quant_method or bits there"),
    ("gptq-8", {"bits": 4}, "not those of GPTQ, 4 bits, groups of 32, which quantization_config says"),
    ("gptq", {"checkpoint_format": "marlin"}, "gptq of checkpoint_format marlin"),
    ("gptq", {"dynamic": {"+:.*up_proj": {"bits": 8}}}, "gptq with other schemes for some layers (dynamic)"),
    ("compressed", of_weights(num_bits=8), "which is none of what quantization_config says"),
    ("compressed", of_weights(strategy="tensor"), "4-bit int weights, strategy tensor"),
    ("compressed", of_weights(type="float"), "4-bit float weights"),
    ("compressed", of_weights(group_size=48), "groups of 48 do not divide"),
    ("compressed", of_weights(actorder="odd"), "actorder odd"),
    ("compressed", {"config_groups": {}}, "in 0 groups"),
    ("compressed", {"config_groups": {"a": {"input_activations": {}}}}, "with quantised activations"),
    ("compressed", {"config_groups": {"a": {"format": "float-quantized"}}}, "a group of format float-quantized"),
    ("compressed", {"format": "marlin-24"}, "compressed-tensors of format marlin-24"),
]


@pytest.mark.parametrize(("form", "changes", "said"), CONFIGS)
def test_a_configuration_that_does_not_fit_is_refused_by_name(
    form: str, changes: dict[str, object], said: str, saved: Callable[[str], Path]
) -> None:
    folder = saved(form)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"quantization_config": config["quantization_config"] | changes}))
    with pytest.raises(ModelFilesError, match=re.escape(said)):
        load_model(folder, "auto", CPU, Parallel())


def test_packed_tensors_without_a_configuration_are_refused(saved: Callable[[str], Path]) -> None:
    folder = saved("awq")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    with pytest.raises(ModelFilesError, match=r"holds packed integers, but config\.json has no quantization_config"):
        open_checkpoint(folder)


def test_memory_is_checked_by_what_is_kept(saved: Callable[[str], Path]) -> None:
    files = opened(saved("awq"))
    kept, dense = (Weights(files, torch.bfloat16, CPU, formats=each).least_bytes(()) for each in ([BLOCKS], []))
    assert kept.keys() == dense.keys()
    for name in dense:
        assert kept[name] == (dense[name] * 22 // 64 if QUANTISED.search(name) else dense[name])


def test_words_are_packed_lowest_first() -> None:
    assert pack(torch.arange(9), 4).tolist() == [0x76543210, 8]
