"""`plait launch --dry-run` refuses what a start refuses, where flags and the model's config.json tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from plait.errors import SettingsError
from plait.nodes.launch import launch
from plait.nodes.settings import LaunchSettings, NodeSettings
from plait.settings import ProcessSettings, SchedulerSettings
from plait_testing.measured_servers import MODELS
from plait_worker.models.loader import dummy_model
from plait_worker.parallel import Parallel

NODES = NodeSettings(head="127.0.0.1:7450", dry_run=True, gpus_per_node=16, nnodes=2, node_rank=1)
QWEN3 = json.loads(MODELS["qwen3-8b"].read_bytes())
V2_LITE = json.loads(MODELS["v2-lite"].read_bytes())


def saved(config: dict[str, Any], folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dry_run(model: str, process: ProcessSettings) -> int:
    return launch(model, LaunchSettings(nodes=NODES, process=process), {})


def refused_by_a_rank(folder: Path, process: ProcessSettings) -> str:
    """What the first rank says at a start."""
    experts = Mock(ranks=Mock(world=process.tp * process.dp)) if process.dp_attention else None
    group = Mock() if process.tp > 1 else None
    with pytest.raises(ValueError) as error:
        dummy_model(folder, "float32", torch.device("cpu"), Parallel(0, process.tp, group, experts=experts))
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "process", "named"),
    [
        (QWEN3, ProcessSettings(tp=5, dp=2), "--tp 5 does not divide the model's MLP width"),
        (
            QWEN3 | {"num_attention_heads": 4, "num_key_value_heads": 4},
            ProcessSettings(tp=8, dp=2),
            "--tp 8 is more than the model's 4",
        ),
        (V2_LITE, ProcessSettings(tp=3, dp=2), "--tp 3 does not divide the model's attention heads"),
        (V2_LITE | {"moe_intermediate_size": 1409}, ProcessSettings(tp=2, dp=2), "experts' width"),
        (QWEN3, ProcessSettings(dp=2, dp_attention=True), "--dp-attention: Qwen3ForCausalLM has no multi-head"),
        (V2_LITE | {"n_routed_experts": 8}, ProcessSettings(dp=16, dp_attention=True), "16 ranks"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused_in_a_rank_s_words(
    config: dict[str, Any],
    process: ProcessSettings,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = saved(config, tmp_path)
    with pytest.raises(SettingsError) as refused:
        dry_run(str(folder), process)
    assert named in refused.value.message
    assert refused.value.message == refused_by_a_rank(folder, process)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("config", "process"),
    [
        (QWEN3, ProcessSettings(tp=8, dp=2)),
        (V2_LITE, ProcessSettings(dp=16, dp_attention=True)),
        (
            V2_LITE | {"n_shared_experts": 0, "moe_intermediate_size": 1409},
            ProcessSettings(tp=2, dp=2, dp_attention=True),
        ),
        ({"architectures": ["OfNoFamily"]}, ProcessSettings(tp=5, dp=2)),
    ],
)
def test_other_layouts_are_printed(
    config: dict[str, Any], process: ProcessSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(str(saved(config, tmp_path)), process) == 0
    assert f"{process.tp * process.dp} ranks" in capsys.readouterr().out


def test_a_model_that_is_not_on_this_machine_is_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run("owner/name", ProcessSettings(tp=5, dp=2)) == 0
    assert "10 ranks" in capsys.readouterr().out


def test_settings_of_an_engine_of_its_own_are_refused_in_a_group() -> None:
    settings = LaunchSettings(
        nodes=NODES, process=ProcessSettings(dp=2), scheduler=SchedulerSettings(itl_target_ms=20.0)
    )
    with pytest.raises(SettingsError, match="--itl-target-ms times one engine's own steps, not a group's"):
        launch("owner/name", settings, {})
