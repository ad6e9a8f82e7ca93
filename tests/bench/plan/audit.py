"""Hold `plait plan` beside what servers on H200s said at start and reached: ratios, and the worst of each kind.

    python tests/bench/plan/audit.py --out tests/bench/results/plan-audit.json

The measured figures are those of tests/bench/results; tests/router/test_plan.py asserts the bounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from plait.bench.result_file import Row, commit, machine, versions
from plait.plan.gpus import GPUS
from plait.plan.layout import Layout, memory
from plait.plan.rates import Expectations

sys.path.insert(0, str(Path(__file__).parents[2]))

from plait_testing.measured_servers import MEASURED, measured_pages, measured_rates, model_of


def rates(scratch: Path) -> Iterator[Row]:
    """Planned over measured output tokens/s."""
    for model, layout, load, rate in measured_rates():
        shape = model_of(model, scratch)
        room = memory(shape, GPUS["h200"], layout, MEASURED)
        planned = Expectations(shape, GPUS["h200"], scratch).at(layout, room, load).output_tokens_per_second
        flags = f"--tp {layout.tp} --dp {layout.dp}{' --dp-attention' if layout.dp_attention else ''}"
        case = f"{model} {flags} {load.input_len}/{load.output_len} @ {load.streams}"
        yield Row(case=case, metric="planned_over_measured_rate", unit="ratio", value=planned / rate)


def pages(scratch: Path) -> Iterator[Row]:
    """Planned over measured KV pages."""
    for name, tp, server, num_pages in measured_pages():
        shape = model_of(name, scratch)
        planned = memory(shape, GPUS["h200"], Layout(tp, 1), server).num_pages
        yield Row(
            case=f"{name} --tp {tp}", metric="planned_over_measured_pages", unit="ratio", value=planned / num_pages
        )


def main() -> int:
    """Write the file and print the extremes; the exit code."""
    parser = argparse.ArgumentParser(description="plait plan beside measured servers")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = [*rates(Path(scratch)), *pages(Path(scratch))]
    for metric in sorted({row.metric for row in found}):
        values = [row.value for row in found if row.metric == metric]
        print(f"{metric}: {min(values):.3f} to {max(values):.3f} of {len(values)}")
    whole = {"commit": commit(), "command": " ".join(sys.argv), "machine": machine(), "versions": versions()}
    given.out.write_text(json.dumps(whole | {"rows": msgspec.to_builtins(found)}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
