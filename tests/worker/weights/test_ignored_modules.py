"""Modules that a checkpoint does not quantise: worker and planner read one list, by the rules of its tool."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plait.errors import ModelNotFoundError
from plait.plan.stored_form import read_storage
from plait_proto.quantisation import ignored
from plait_testing.fp8_models import write_fp8
from plait_worker.errors import ModelFilesError
from plait_worker.weights.safetensors_folder import SafetensorsFolder, read_json

LAYER = "model.layers.0.self_attn"
MODULE = f"{LAYER}.q_proj"
GROUPS = {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": GROUPS}
FIELDS = {"fp8": "modules_to_not_convert", "modelopt": "exclude_modules", "compressed-tensors": "ignore"}

NAMED = [
    (COMPRESSED, MODULE),
    (COMPRESSED, "re:.*self_attn.*"),
    (COMPRESSED, "re:model[.]layers[.]0[.]"),
    (COMPRESSED, "re:(?i).*Q_PROJ"),
    (MODELOPT, "*self_attn*"),
    (MODELOPT, f"{LAYER}*"),
    (MODELOPT, MODULE),
    (BLOCKS, MODULE),
    (BLOCKS, LAYER),
    (BLOCKS, "q_proj"),
    (BLOCKS, "re:.*q_proj"),
]
NOT_NAMED = [
    (COMPRESSED, LAYER),  # only a module of this name would be left out: compressed-tensors' _match_name
    (COMPRESSED, "q_proj"),
    (COMPRESSED, "re:self_attn.*"),  # matched from the beginning
    (COMPRESSED, "re:.*vision.*"),
    (COMPRESSED, "lm_head"),
    (MODELOPT, "self_attn*"),
    (MODELOPT, "model.layers.7*"),
    (BLOCKS, "proj"),
    (BLOCKS, "gate"),
    (BLOCKS, "model.layers.00"),
]


@pytest.fixture
def folder(tiny_llama: Any, tmp_path: Path) -> Path:
    tiny_llama.save_pretrained(tmp_path / "whole")
    write_fp8(tmp_path / "whole", tmp_path / "fp8", "channel")
    return tmp_path / "fp8"


def state(folder: Path, stated: dict[str, Any], patterns: object) -> dict[str, Any]:
    """Write the configuration of a folder; returns it."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = stated | {FIELDS[stated["quant_method"]]: patterns}
    (folder / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize(("stated", "pattern"), NAMED)
def test_what_is_left_out_is_planned_in_16_bits_and_refused_if_it_is_quantised(
    stated: dict[str, Any], pattern: str, folder: Path
) -> None:
    config = state(folder, stated, ["elsewhere", pattern])
    form = read_storage(config, "config.json").form
    assert form is not None
    assert not form.keeps(MODULE)
    with pytest.raises(ModelFilesError, match="is quantised, but quantization_config says"):
        SafetensorsFolder(folder)


@pytest.mark.parametrize(("stated", "pattern"), NOT_NAMED)
def test_what_only_looks_alike_stays_quantised(stated: dict[str, Any], pattern: str, folder: Path) -> None:
    config = state(folder, stated, [pattern])
    form = read_storage(config, "config.json").form
    assert form is not None
    assert form.keeps(MODULE)
    assert f"{MODULE}.weight" in SafetensorsFolder(folder).names


@pytest.mark.parametrize("stated", [BLOCKS, MODELOPT, COMPRESSED], ids=FIELDS)
@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["re:["], "'re:[' should name modules that are not quantised, but is no regular expression"),
        ("lm_head", "but must be a list of strings"),
        ([7], "but must be a list of strings"),
    ],
)
def test_a_list_that_is_none_is_refused_by_both_in_one_sentence(
    stated: dict[str, Any], patterns: object, said: str, folder: Path
) -> None:
    config = state(folder, stated, patterns)
    refused: list[tuple[Callable[[], object], type[Exception]]] = [
        (lambda: SafetensorsFolder(folder), ModelFilesError),
        (lambda: read_storage(config, str(folder / "config.json")), ModelNotFoundError),
    ]
    sentences = []
    for read, kind in refused:
        with pytest.raises(kind) as error:
            read()
        sentences.append(str(error.value))
    assert sentences[0] == sentences[1]
    assert said in sentences[0]
    assert read_json(folder / "config.json").where in sentences[0]


def test_an_expression_that_backtracks_for_years_is_refused_by_both_in_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ignored, "MATCHING_SECONDS", 0.2)
    config = state(folder, COMPRESSED, ["re:(([a-z0-9_.]+)+)+!"])
    with pytest.raises(ModelFilesError, match=r"takes more than 0\.2 s: correct them") as of_worker:
        SafetensorsFolder(folder)
    form = read_storage(config, str(folder / "config.json")).form
    assert form is not None
    with pytest.raises(ModelNotFoundError) as of_planner:
        form.keeps(MODULE)
    assert str(of_worker.value) == str(of_planner.value)


def test_the_seconds_of_matching_are_those_of_all_names_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ignored, "MATCHING_SECONDS", 0.3)
    form = read_storage(state(folder, COMPRESSED, ["re:(a+)+!"]), "config.json").form
    assert form is not None
    with pytest.raises(ModelNotFoundError):
        all(form.keeps("a" * (16 + length % 5)) for length in range(100))


def test_what_a_file_calls_its_method_is_shown_in_one_line_and_cut() -> None:
    stated = {"quant_method": "AWQ\n\x1b[31mred\u202e" + 100_000 * "x"}
    with pytest.raises(ModelNotFoundError) as error:
        read_storage({"quantization_config": stated}, "config.json")
    assert str(error.value).isprintable()
    assert r"quantisation AWQ\n\x1b[31mred\u202exxx" in str(error.value)
    assert str(error.value).endswith("use such files, or the unquantised model")
    assert len(str(error.value)) < 600
