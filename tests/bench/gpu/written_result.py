"""The results file of a benchmark that runs on one GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from plait.bench.result_file import commit, machine, versions


def write_result(out: Path, script: str, rows: Sequence[dict[str, object]]) -> None:
    """Rows with the command that gave them: ``script``, below ``tests/bench/gpu``, and this process's arguments."""
    result = {
        "commit": commit(),
        "command": " ".join([f"tests/bench/gpu/{script}", *sys.argv[1:]]),
        "machine": {"gpu": torch.cuda.get_device_name()} | machine(),
        "versions": versions(("plait", "torch", "triton")),
        "rows": rows,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
