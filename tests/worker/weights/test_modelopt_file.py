"""A quantisation that only ModelOpt's own file states, as in its older checkpoints, is read as config.json's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plait.errors import ModelNotFoundError
from plait.plan.model import read_model
from plait_testing.fp8_models import write_fp8
from plait_testing.packed_models import FORMS, state_in_modelopts_file, write_packed
from plait_worker.errors import ModelFilesError
from plait_worker.weights.safetensors_folder import SafetensorsFolder


@pytest.fixture(params=["FP8", "NVFP4"])
def folder(request: pytest.FixtureRequest, check_models: Path, tmp_path: Path) -> Path:
    made = tmp_path / "made"
    if request.param == "NVFP4":
        write_packed(check_models / "recall-gqa", made, FORMS["nvfp4-modelopt"], 16)
        return made
    write_fp8(check_models / "recall-gqa", made, "channel")
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (made / "config.json").write_text(json.dumps(config))
    return made


def read(folder: Path, scratch: Path) -> tuple[Any, ...]:
    files = SafetensorsFolder(folder)
    scratch.mkdir()
    return files.fp8, type(files.packed), sorted(files.names), read_model(str(folder), scratch).storage


def test_worker_and_planner_read_it_as_config_json_s(folder: Path, tmp_path: Path) -> None:
    stated = read(folder, tmp_path / "a")
    state_in_modelopts_file(folder)
    assert read(folder, tmp_path / "b") == stated
    (folder / "hf_quant_config.json").unlink()
    assert read(folder, tmp_path / "c") != stated


def test_config_json_wins_where_both_state_something(folder: Path) -> None:
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    SafetensorsFolder(folder)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("[]", "hf_quant_config.json (holds|is) no JSON object"),
        ('{"quantization":', "hf_quant_config.json is (not valid JSON|no JSON object)"),
        ('{"quantization": 7}', "quantization is 7, but must be an object"),
        ('{"quantization": {"quant_algo": "W4A8_AWQ"}}', "and hf_quant_config.json, quantization_config: quantisation"),
    ],
)
def test_a_file_that_is_not_understood_is_refused_by_name(
    written: str, said: str, check_models: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path / "config.json").write_text((check_models / "recall-gqa" / "config.json").read_text())
    (tmp_path / "hf_quant_config.json").write_text(written)
    with pytest.raises(ModelFilesError, match=said):
        SafetensorsFolder(tmp_path)
    with pytest.raises(ModelNotFoundError, match=said):
        read_model(str(tmp_path), tmp_path_factory.mktemp("scratch"))
