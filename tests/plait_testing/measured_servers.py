"""What servers on H200s said at start and reached, beside which `plait plan` is held."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.plan.layout import Layout
from plait.plan.model import PlannedModel, read_model
from plait.plan.settings import PlanLoadSettings, PlanServerSettings
from plait.plan.stored_form import with_fp8

from plait_testing import budgets

RESULTS = budgets.ROOT / "tests" / "bench" / "results"
SHAPES = budgets.ROOT / "router" / "sim" / "data" / "models"
MODELS = {
    "qwen3-8b": SHAPES / "qwen3-8b.json",
    "llama-3.1-70b": SHAPES / "llama-3.1-70b.json",
    "v2-lite": SHAPES / "deepseek-v2-lite.json",
    "recall-gqa": budgets.ROOT / "tests" / "models" / "recall-gqa",
    "recall-mla": budgets.ROOT / "tests" / "models" / "recall-mla",
}
MEASURED = PlanServerSettings(max_seqs=256, max_batch_tokens=8192)
"""As serve_load.py sets them."""
LOAD = re.compile(r"(\d+)/(\d+) @ (\d+)(?:, --dp (\d))?")


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_bytes())["rows"]
    return found


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
"""Of the shape qwen3-8b-awq of model_shapes.py."""


def model_of(name: str, scratch: Path) -> PlannedModel:
    """A model by name; with `-fp8` as `--quantization fp8` loads it, with `-awq` from such files."""
    base, is_awq, is_fp8 = name.removesuffix("-awq").removesuffix("-fp8"), name.endswith("-awq"), name.endswith("-fp8")
    if is_awq:
        config = json.loads(MODELS[base].read_bytes())
        (scratch / f"{name}.json").write_text(json.dumps(config | {"quantization_config": AWQ}))
    found = read_model(str(scratch / f"{name}.json" if is_awq else MODELS[base]), scratch)
    return replace(found, storage=with_fp8(found.storage, "fp8" if is_fp8 else "auto"))


def measured_rates() -> list[tuple[str, Layout, PlanLoadSettings, float]]:
    """Model, layout, load, output tokens/s."""
    files = {
        "gpu-qwen3-8b": ("qwen3-8b", 1),
        "gpu-v2-lite": ("v2-lite", 1),
        "gpu-qwen3-8b-tp2": ("qwen3-8b", 2),
        "gpu-v2-lite-tp2": ("v2-lite", 2),
        "gpu-replicas": ("qwen3-8b", 1),
        "gpu-qwen3-8b-fp8": ("qwen3-8b-fp8", 1),
        "gpu-v2-lite-fp8": ("v2-lite-fp8", 1),
        "gpu-qwen3-8b-awq": ("qwen3-8b-awq", 1),
    }
    found = []
    for file, (model, tp) in files.items():
        for row in rows(file):
            case = LOAD.fullmatch(row["case"])
            if case is not None and row["metric"] == "output_tokens_per_second":
                prompt, answer, streams, dp = (int(number or 1) for number in case.groups())
                load = PlanLoadSettings(input_len=prompt, output_len=answer, streams=streams)
                found.append((model, Layout(tp, dp), load, float(row["value"])))
    return found + measured_with_shared_experts() + measured_since()


def measured_since() -> list[tuple[str, Layout, PlanLoadSettings, float]]:
    """Of one GPU, newer builds: the medians of loads that other files have under other names."""
    cases = [
        ("gpu-v2-lite-one-stream", "v2-lite", r"128/128 @ 1, after, run \d", "output_tokens_per_second"),
        ("gpu-itl-target", "qwen3-8b", r"1024/128 @ 256, in turns on one GPU, c7cf3b9", "output_tokens_per_second"),
        ("gpu-fields", "qwen3-8b", r"no fields .*", "rate"),
    ]
    found = []
    for file, model, name, metric in cases:
        rates = [row for row in rows(file) if re.fullmatch(name, row["case"]) and row["metric"] == metric]
        case = LOAD.match(rates[0]["case"])
        prompt, answer, streams = (int(number) for number in case.groups()[:3]) if case else (128, 128, 256)
        load = PlanLoadSettings(input_len=prompt, output_len=answer, streams=streams)
        found.append((model, Layout(1, 1), load, statistics.median(float(row["value"]) for row in rates)))
    return found


def measured_with_shared_experts() -> list[tuple[str, Layout, PlanLoadSettings, float]]:
    """Of two GPUs; the loads of 256 streams waited for late ranks, which was mended after they were taken."""
    found = []
    for row in rows("gpu-v2-lite-dp2"):
        case = LOAD.fullmatch(row["case"])
        if case is not None and row["metric"] == "output_tokens_per_second" and case[3] != "256":
            load = PlanLoadSettings(input_len=int(case[1]), output_len=int(case[2]), streams=int(case[3]))
            found.append(("v2-lite", Layout(1, 2, dp_attention=True), load, float(row["value"])))
    return found


def measured_pages() -> list[tuple[str, int, PlanServerSettings, int]]:
    """Model, `--tp`, the server's sizes, KV pages of a rank."""
    found = []
    for row in rows("gpu-start-memory"):
        name, *words = str(row["case"]).split()
        given = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        sizes = PlanServerSettings(max_seqs=given["--max-seqs"], max_batch_tokens=given["--max-batch-tokens"])
        found.append((name, given["--tp"], sizes, int(row["value"])))
    return found
