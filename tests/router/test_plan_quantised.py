"""`plait plan` of quantised checkpoints: weights as the worker counts them, and what serve refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from plait import cli
from plait.plan.layout import Layout
from plait.plan.model import PlannedModel, read_model
from plait.plan.parts import ATTENTION, EXPERTS, HEAD, HeldPart
from plait.plan.stored_form import with_fp8
from plait_proto import ExitCode
from plait_testing.measured_servers import AWQ, MODELS
from plait_worker.errors import ModelFilesError
from plait_worker.models.loader import open_config
from plait_worker.models.loader import read_model as read_for_worker
from plait_worker.parallel import Parallel
from plait_worker.weights.dummy import DummyWeights
from plait_worker.weights.fields import Fields
from plait_worker.weights.formats.fp8 import FP8_ON_LOAD
from plait_worker.weights.formats.int4 import INT4
from plait_worker.weights.packed.layout import Int4Form
from plait_worker.weights.quantisation_config import read_quantisation
from plait_worker.weights.weight_memory import WeightMemory

QWEN3 = json.loads(MODELS["qwen3-8b"].read_bytes()) | {"num_hidden_layers": 4}
V2_LITE = json.loads(MODELS["v2-lite"].read_bytes()) | {"num_hidden_layers": 2, "qk_rope_head_dim": 64}
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
}
MINIMAX = QWEN3_MOE | {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "moe_intermediate_size": None,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "num_experts": None,
    "num_local_experts": 256,
    "vocab_size": 200_064,
    "max_position_embeddings": 196_608,
    "quantization_config": FP8_BLOCKS,
}

NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def packed(kind: str, bits: int, **more: object) -> dict[str, Any]:
    """compressed-tensors of one group."""
    stored = "mxfp4-pack-quantized" if kind == "float" else "pack-quantized"
    weights = {"num_bits": bits, "type": kind, "strategy": "group", "group_size": 32, "symmetric": True} | more
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": {"weights": weights}}}


def written(config: dict[str, Any], folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return path


def planned(config: dict[str, Any], folder: Path, quantization: str = "auto") -> PlannedModel:
    (folder / "copies").mkdir(exist_ok=True)
    found = read_model(str(written(config, folder)), folder / "copies")
    return replace(found, storage=with_fp8(found.storage, quantization))


def held(model: PlannedModel, name: str, tp: int = 1) -> list[HeldPart]:
    return [each for each in Layout(tp, 1).held(model) if each.part.name == name]


def bytes_on_worker(folder: Path, tp: int, quantization: str) -> int:
    """Of rank 0, counted on torch's meta device, which does not stack shared experts with the others."""
    stated = json.loads((folder / "config.json").read_bytes())
    form: Int4Form | None = getattr(read_quantisation(Fields(stated, "config.json")), "int4_form_of_all", None)
    formats = [FP8_ON_LOAD] if quantization == "fp8" else [INT4] if form is not None else []
    weights = DummyWeights(torch.bfloat16, torch.device("meta"), WeightMemory(), formats, form)
    with torch.inference_mode():
        read_for_worker(open_config(folder), weights, Parallel(0, tp, Mock() if tp > 1 else None), None)
    return sum(weights.held.taken.values())


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("config", "stored", "quantization"),
    [
        (QWEN3, None, "auto"),
        (QWEN3, None, "fp8"),
        (QWEN3, AWQ, "auto"),
        (QWEN3, GPTQ, "auto"),
        (QWEN3, packed("float", 4), "auto"),
        (V2_LITE, None, "fp8"),
        (V2_LITE, AWQ, "auto"),
        (QWEN3_MOE, None, "fp8"),
        (QWEN3_MOE, AWQ, "auto"),
        (QWEN3_MOE, packed("float", 4), "auto"),
    ],
)
def test_weights_are_within_a_fiftieth_of_what_a_rank_counts(
    config: dict[str, Any], stored: dict[str, Any] | None, quantization: str, tp: int, tmp_path: Path
) -> None:
    model = planned(config | {"quantization_config": stored}, tmp_path, quantization)
    assert Layout(tp, 1).weight_bytes(model) == pytest.approx(bytes_on_worker(tmp_path, tp, quantization), rel=0.02)


@pytest.mark.parametrize(
    ("stored", "bytes_per_element"),
    [
        (FP8_BLOCKS, 1 + 4 / 128**2),
        ({"quant_method": "fp8"}, 1 + 4 / 4096),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1 + 4 / 4096),
        (NVFP4, 1 + 4 / 4096),
        (FP8_BLOCKS | {"weight_block_size": [64, 64]}, 2),
        (AWQ, 0.5 + 3 / 128),
        (GPTQ, 0.5 + 2 / 128),
        (GPTQ | {"sym": False}, 0.5 + 3 / 128),
        (GPTQ | {"group_size": -1}, 0.5 + 2 / 4096),
        (GPTQ | {"bits": 8}, 2),
        (GPTQ | {"group_size": 16}, 2),
        (packed("int", 4), 0.5 + 2 / 32),
        (packed("int", 8), 2),
        (packed("float", 4), 0.5 + 2 / 32),
    ],
)
def test_a_matrix_takes_what_docs_quantisation_says(
    stored: dict[str, Any], bytes_per_element: float, tmp_path: Path
) -> None:
    parts = held(planned(QWEN3 | {"quantization_config": stored}, tmp_path), ATTENTION)
    assert parts[0].num_bytes / parts[0].part.num_elements == pytest.approx(bytes_per_element)


def test_the_head_and_the_latent_s_up_projection_stay_in_16_bits(tmp_path: Path) -> None:
    model = planned(V2_LITE | {"quantization_config": FP8_BLOCKS}, tmp_path)
    (head,), attention = held(model, HEAD), held(model, ATTENTION)
    assert head.quantised == 0
    assert [each.quantised for each in attention if each.part.num_inputs == V2_LITE["kv_lora_rank"]] == [0]


def test_modules_that_the_files_leave_out_stay_in_16_bits(tmp_path: Path) -> None:
    stored = AWQ | {"modules_to_not_convert": ["self_attn", "re:.*layers\\.[01]\\.mlp.*"]}
    model = planned(QWEN3 | {"quantization_config": stored}, tmp_path)
    assert {each.quantised for each in held(model, ATTENTION)} == {0}
    assert {each.quantised for each in held(model, "MLP")} == {0.5}


@pytest.mark.parametrize(
    "stored",
    [
        FP8_BLOCKS | {"ignored_layers": ["self_attn"]},
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*self_attn*"]},
        GPTQ | {"dynamic": {"-:.*self_attn": {}}},
        packed("int", 4) | {"ignore": ["re:.*self_attn"]},
    ],
)
def test_each_method_leaves_modules_out_in_its_own_field(stored: dict[str, Any], tmp_path: Path) -> None:
    model = planned(QWEN3 | {"quantization_config": stored}, tmp_path)
    assert {each.quantised for each in held(model, ATTENTION)} == {0}
    assert {each.quantised for each in held(model, "MLP")} == {1}


def test_modules_of_8_bits_beside_others_of_4_are_held_in_16(tmp_path: Path) -> None:
    wide = packed("int", 8)["config_groups"]["group_0"] | {"targets": ["re:.*self_attn"]}
    stored = packed("int", 4)
    stored["config_groups"]["group_1"] = wide
    model = planned(QWEN3 | {"quantization_config": stored}, tmp_path)
    assert {each.quantised for each in held(model, ATTENTION)} == {0}
    assert {each.quantised for each in held(model, "MLP")} == {1}


def test_experts_whose_blocks_ranks_would_cut_are_held_in_16_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = planned(MINIMAX, tmp_path)
    assert {each.quantised for each in held(model, EXPERTS, 4)} == {1}
    assert {each.quantised for each in held(model, EXPERTS, 8)} == {0}
    assert cli.run(["plan", str(tmp_path / "config.json"), "--gpus", "8"]) == 0
    assert "--tp 8 cuts within groups that share a scale: experts in 16 bits." in capsys.readouterr().out


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_nvfp4_is_held_in_fp8_and_the_plan_says_so(
    quantization: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(QWEN3 | {"quantization_config": NVFP4}, tmp_path)
    assert cli.run(["plan", str(path), "--gpus", "1", "--quantization", quantization]) == 0
    assert "NVFP4 weights are upcast to FP8: no kernels multiply NVFP4" in capsys.readouterr().out


ACT_ORDER = GPTQ | {"desc_act": True}


@pytest.mark.parametrize(
    ("config", "stored", "said"),
    [
        (QWEN3_MOE, ACT_ORDER, "experts in 16 bits, 302 MB instead of 78 MB"),
        (QWEN3_MOE, packed("int", 4, actorder="group"), "experts in 16 bits, 302 MB instead of 85 MB"),
        (V2_LITE, ACT_ORDER, "experts and shared experts in 16 bits, 1.1 GB instead of 294 MB"),
    ],
)
def test_experts_that_act_order_widens_are_counted_and_named(
    config: dict[str, Any], stored: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = planned(config | {"quantization_config": stored}, tmp_path)
    assert {each.quantised for each in held(model, EXPERTS)} == {0}
    assert {each.quantised for each in held(model, ATTENTION) if each.part.module} == {1}
    assert cli.run(["plan", str(tmp_path / "config.json")]) == 0
    assert f"Act-order (desc_act, actorder): {said}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        (QWEN3, ACT_ORDER),
        (QWEN3_MOE, GPTQ),
        (QWEN3_MOE, ACT_ORDER | {"group_size": -1}),
        (QWEN3_MOE, packed("int", 4, actorder="weight")),
        (QWEN3_MOE, ACT_ORDER | {"modules_to_not_convert": ["experts"]}),
    ],
)
def test_nothing_is_said_of_act_order_where_it_widens_no_experts(
    config: dict[str, Any], stored: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["plan", str(written(config | {"quantization_config": stored}, tmp_path))]) == 0
    assert "Act-order" not in capsys.readouterr().out


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
@pytest.mark.parametrize(("gpu", "low", "high", "said"), [("h200", 229, 232, "FP8"), ("b200", 456, 460, "upcast")])
def test_fp8_files_stay_so_on_hopper_and_are_upcast_on_blackwell(
    gpu: str, low: float, high: float, said: str, quantization: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--gpus", "8", "--gpu", gpu, "--quantization", quantization]
    assert cli.run(["plan", str(written(MINIMAX, tmp_path)), *words]) == 0
    summary = capsys.readouterr().out.splitlines()[0]
    weights = re.search(r"weights ([\d.]+) GB", summary)
    assert weights is not None
    assert low < float(weights[1]) < high
    assert said in summary


def test_a_70b_in_4_bits_is_planned_on_one_h100(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama = json.loads(MODELS["llama-3.1-70b"].read_bytes()) | {"quantization_config": AWQ}
    assert cli.run(["plan", str(written(llama, tmp_path)), "--gpu", "h100"]) == 0
    assert "weights 40.0 GB with INT4 matrices" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt W4A8_AWQ"),
        (NVFP4 | {"group_size": 32}, "modelopt NVFP4 in groups of 32"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        (AWQ | {"version": "gemv"}, "awq of version gemv with 4 bits"),
        (GPTQ | {"bits": 3}, "gptq with 3 bits"),
        (packed("int", 5), "compressed-tensors of 5-bit int weights"),
        (FP8_BLOCKS | {"activation_scheme": "static"}, "fp8 with stored scales of activations"),
    ],
)
def test_a_scheme_that_serve_refuses_is_refused_in_its_words(
    stored: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(QWEN3 | {"quantization_config": stored}, tmp_path)
    with pytest.raises(ModelFilesError, match=named) as refused:
        open_config(tmp_path)
    assert cli.run(["plan", str(path)]) == ExitCode.MODEL_FILES
    assert str(refused.value) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ("fp8", "quantization_config is 'fp8', but must be an object"),
        ({"quant_method": 8}, "quant_method is 8, but must be a string"),
        (AWQ | {"group_size": -5}, "group_size is -5, but must be a whole number from 1 to 4294967296, or -1: "),
        (AWQ | {"group_size": "128"}, "group_size is '128', but must be a whole number"),
    ],
)
def test_a_wrong_entry_is_named_as_serve_names_it(
    stored: object, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(QWEN3 | {"quantization_config": stored}, tmp_path)
    with pytest.raises(ModelFilesError, match=named) as refused:
        open_config(tmp_path)
    assert cli.run(["plan", str(path)]) == ExitCode.MODEL_FILES
    assert str(refused.value) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stored", "words", "named"),
    [(AWQ, [], "takes a folder of 16-bit or FP8 weights"), (None, ["--gpu", "b200"], "compute capability 9.0")],
)
def test_quantization_that_serve_refuses_is_refused(
    stored: object, words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(QWEN3 | {"quantization_config": stored}, tmp_path)
    assert cli.run(["plan", str(path), "--quantization", "fp8", *words]) == ExitCode.SETTINGS
    assert named in capsys.readouterr().err.splitlines()[-1]
