"""`plait plan`: sizes and rates beside what servers said and reached, and the command line."""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path

import pytest
from plait import cli
from plait.plan.gpus import GPUS
from plait.plan.layout import Layout, memory
from plait.plan.model import PlannedModel, read_model
from plait.plan.parts import EXPERTS
from plait.plan.rates import Expectations
from plait.plan.settings import PlanLoadSettings, PlanServerSettings
from plait_proto import ExitCode
from plait_testing.measured_servers import MEASURED, MODELS, measured_pages, measured_rates, model_of


def test_the_plan_is_compared_with_forty_measured_loads_or_more() -> None:
    assert len(measured_rates()) >= 40


@pytest.mark.parametrize(("model", "layout", "load", "rate"), measured_rates())
def test_a_rate_is_within_a_quarter_of_what_was_measured(
    model: str, layout: Layout, load: PlanLoadSettings, rate: float, tmp_path: Path
) -> None:
    shape = model_of(model, tmp_path)
    room = memory(shape, GPUS["h200"], layout, MEASURED)
    expected = Expectations(shape, GPUS["h200"], tmp_path).at(layout, room, load)
    assert expected.output_tokens_per_second == pytest.approx(rate, rel=0.25)


@pytest.mark.parametrize(("name", "tp", "server", "num_pages"), measured_pages())
def test_the_pages_are_within_a_twentieth_of_what_a_server_said(
    name: str, tp: int, server: PlanServerSettings, num_pages: int, tmp_path: Path
) -> None:
    shape = model_of(name, tmp_path)
    assert memory(shape, GPUS["h200"], Layout(tp, 1), server).num_pages == pytest.approx(num_pages, rel=0.05)


def test_the_plan_names_a_layout_its_memory_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", str(MODELS["qwen3-8b"]), "--gpus", "2", "--kv-cache-dtype", "fp8"]) == 0
    printed = capsys.readouterr().out
    assert "2 H200 of 150.8 GB; weights 16.4 GB" in printed
    assert {"--dp 2", "--tp 2"} <= set(re.findall(r"^[* ] (--\S+ \d)", printed, re.MULTILINE))
    assert f"with the folder that has the weights of {MODELS['qwen3-8b']} for MODEL:" in printed
    assert "  plait serve MODEL --dp 2 --kv-cache-dtype fp8\n" in printed


@pytest.mark.parametrize("part", [".", "config.json"])
def test_a_folder_with_weights_is_in_the_command(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = MODELS["recall-gqa"]
    assert cli.run(["plan", str(folder / part), "--max-model-len", "64", "--input-len", "32", "--output-len", "8"]) == 0
    assert f"Use:\n  plait serve {folder} " in capsys.readouterr().out


def test_the_command_has_every_setting_that_changed_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--quantization fp8 --kv-cache-dtype fp8 --memory-fraction 0.8 --page-size 16 --max-seqs 100 "
        "--max-batch-tokens 4096"
    )
    assert cli.run(["plan", str(MODELS["qwen3-8b"]), "--max-model-len", "4096", *words.split()]) == 0
    assert f"  plait serve MODEL --max-model-len 4096 {words}\n" in capsys.readouterr().out


def test_a_folder_with_a_space_is_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_bytes(MODELS["qwen3-8b"].read_bytes())
    assert cli.run(["plan", str(folder)]) == 0
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  plait serve"))
    assert shlex.split(command)[2] == str(folder)


def test_more_gpus_than_a_node_has_are_launched_on_several(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", str(MODELS["llama-3.1-70b"]), "--gpus", "16"]) == 0
    printed = capsys.readouterr().out
    assert "docs/multi-node.md" in printed
    assert re.search(r"^  plait launch MODEL --nnodes 2 --node-rank RANK .* --tp [248] --dp \d$", printed, re.MULTILINE)
    assert cli.run(["plan", str(MODELS["llama-3.1-70b"]), "--gpus", "16", "--gpus-per-node", "16"]) == 0
    assert "  plait serve MODEL --tp " in capsys.readouterr().out


def test_gpus_that_no_layout_takes_stay_free(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", str(MODELS["llama-3.1-70b"]), "--gpus", "3"]) == 0
    printed = capsys.readouterr().out
    assert "No layout of all 3 GPUs fits, so these take 2. Values of --tp that divide the model: 1, 2." in printed
    assert "  plait serve MODEL --tp 2\n" in printed


def test_a_model_that_is_too_large_is_told_how_many_gpus_hold_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", str(MODELS["llama-3.1-70b"])]) == ExitCode.HARDWARE
    assert "use --gpus 2 (--tp 2)" in capsys.readouterr().err.splitlines()[-1]


def test_dense_layers_among_sparse_ones_limit_the_ranks(tmp_path: Path) -> None:
    config = QWEN3_MOE | {"intermediate_size": 6144 + 2}
    assert {tp for tp in (1, 2, 4, 8) if _read(config, tmp_path).takes(tp)} == {1, 2, 4, 8}
    assert {tp for tp in (1, 2, 4, 8) if _read(config | {"mlp_only_layers": [0]}, tmp_path).takes(tp)} == {1, 2}


def test_many_streams_are_planned_in_a_moment(tmp_path: Path) -> None:
    shape, load = model_of("qwen3-8b", tmp_path), PlanLoadSettings(streams=65_536)
    room = memory(shape, GPUS["h200"], Layout(1, 1), MEASURED)
    began = time.monotonic()
    Expectations(shape, GPUS["h200"], tmp_path).at(Layout(1, 1), room, load)
    assert time.monotonic() - began < 5


QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
}


def _read(config: dict[str, object], folder: Path) -> PlannedModel:
    path = folder / "given.json"
    path.write_text(json.dumps(config))
    return read_model(str(path), folder)


def test_free_replicas_hold_twice_what_one_holds_and_mla_ranks_copy_their_cache(tmp_path: Path) -> None:
    shape = model_of("v2-lite", tmp_path)
    one, divided = (memory(shape, GPUS["h200"], Layout(tp, 1), MEASURED) for tp in (1, 2))
    assert divided.page_bytes == one.page_bytes
    gqa = model_of("qwen3-8b", tmp_path)
    whole, half = (memory(gqa, GPUS["h200"], Layout(tp, 1), MEASURED) for tp in (1, 2))
    assert half.page_bytes == whole.page_bytes / 2


def test_experts_are_divided_among_all_ranks_of_dp_attention(tmp_path: Path) -> None:
    shape = model_of("v2-lite", tmp_path)
    experts = sum(held.num_bytes for held in Layout(1, 1).held(shape) if held.part.name == EXPERTS)
    copied = shape.size.weight_bytes - experts
    assert 0 < copied < shape.size.weight_bytes / 4
    assert Layout(1, 4, dp_attention=True).weight_bytes(shape) == copied + experts / 4


def test_a_context_that_the_pool_does_not_hold_becomes_the_longest_that_it_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["plan", str(MODELS["qwen3-8b"]), "--gpu", "h100", "--memory-fraction", "0.3"]) == 0
    longest = re.search(r"--max-model-len (\d+)", capsys.readouterr().out)
    assert longest is not None
    assert 1152 <= int(longest[1]) < 40_960


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["--gpu", "a100"], ExitCode.SETTINGS, "h100, h200, b200"),
        (["--gpus", "0"], ExitCode.SETTINGS, "1 to 64"),
        (["--page-size", "48"], ExitCode.SETTINGS, "power of two"),
        (["--input-len", "200000"], ExitCode.SETTINGS, "--input-len"),
        (["--memory-fraction", "0.1"], ExitCode.HARDWARE, "16.4 GB"),
    ],
)
def test_what_cannot_be_planned_is_named(
    words: list[str], code: ExitCode, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["plan", str(MODELS["qwen3-8b"]), *words]) == code
    assert named in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("text", [None, "{}", "no JSON", '{"hidden_size": "x"}'])
def test_a_model_that_is_none_is_refused_with_what_to_give(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    assert cli.run(["plan", str(path)]) == ExitCode.MODEL_FILES
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("named", [{"architectures": ["NopeForCausalLM"]}, {}])
def test_an_architecture_that_is_not_served_is_not_planned(
    named: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({name: size for name, size in QWEN3_MOE.items() if name != "architectures"} | named))
    assert cli.run(["plan", str(path)]) == ExitCode.MODEL_FILES
    name = "NopeForCausalLM" if named else "none"
    assert f"{path}: the architecture `{name}` is not served; these are: Llama" in capsys.readouterr().err


def test_a_model_without_gpu_kernels_is_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"architectures": ["DeepseekV4ForCausalLM"]}')
    assert cli.run(["plan", str(path)]) == ExitCode.SETTINGS
    assert "--device cpu" in capsys.readouterr().err.splitlines()[-1]
