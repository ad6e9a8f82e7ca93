"""`--metric-names plait,vllm` on a running server of two replicas."""

from __future__ import annotations

from pathlib import Path

import httpx
from plait.http.vllm_metrics import NAMES
from plait_testing.metrics import read_metrics
from plait_testing.running_server import StartServer


def test_vllms_names_have_the_values_of_ours(server: StartServer, check_models: Path) -> None:
    flags = ("--dp", "2", "--threads", "1", "--max-model-len", "512", "--page-size", "16", "--num-pages", "64")
    running = server(check_models / "recall-gqa", *flags, "--metric-names", "plait,vllm")
    asked = {"prompt": "count 1 9", "max_tokens": 4, "n": 2}
    assert httpx.post(running.url + "/v1/completions", json=asked, timeout=60).status_code == 200
    values = read_metrics(running.url)
    assert values['plait_server_info{model="recall-gqa",page_size="16"}'] == 1
    renamed = [
        (name.replace(ours, theirs, 1), value)
        for name, value in values.items()
        for ours, names in NAMES.items()
        if name.startswith((f"{ours}{{", f"{ours}_total", f"{ours}_bucket", f"{ours}_count", f"{ours}_sum"))
        and 'replica="' in name
        for theirs in names
    ]
    assert len(renamed) > 2 * len(NAMES)
    for name, value in renamed:
        bare, _, labels = name.removesuffix("}").partition("{")
        wanted = labels.replace("replica=", "engine=").replace("reason=", "finished_reason=").split(",")
        assert values[_name(values, bare, {*wanted, 'model_name="recall-gqa"'})] == value
    generated = [values[_name(values, "vllm:generation_tokens_total", _of_engine(engine))] for engine in "01"]
    assert sum(generated) > 0
    for engine in "01":
        config = _of_engine(engine) | {'block_size="16"', 'num_gpu_blocks="64"'}
        assert values[_name(values, "vllm:cache_config_info", config)] == 1


def _of_engine(number: str) -> set[str]:
    return {f'engine="{number}"', 'model_name="recall-gqa"'}


def _name(values: dict[str, float], bare: str, labels: set[str]) -> str:
    """The sample's name as the page has it: labels come in any order."""
    (found,) = (
        name
        for name in values
        if name.partition("{")[0] == bare and set(name.partition("{")[2].removesuffix("}").split(",")) == labels
    )
    return found
