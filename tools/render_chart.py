"""Render the chart's examples into tests/deploy/golden: `python tools/render_chart.py`; needs `helm`.

The first line of each file is a digest of the chart's sources, by which a test without helm knows a stale one.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "chart"
EXAMPLES = CHART / "examples"
GOLDEN = ROOT / "tests" / "deploy" / "golden"


def digest(example: Path) -> str:
    """Of the chart and one example."""
    parts = [CHART / "Chart.yaml", CHART / "values.yaml", *sorted((CHART / "templates").iterdir()), example]
    found = hashlib.sha256()
    for part in parts:
        found.update(part.name.encode() + b"\0" + part.read_bytes() + b"\0")
    return found.hexdigest()


def head(example: Path) -> str:
    """The first line of its golden file."""
    return f"# helm template plait deploy/chart -f deploy/chart/examples/{example.name} # {digest(example)[:16]}\n"


def render(*words: str) -> subprocess.CompletedProcess[str]:
    """`helm template plait deploy/chart WORDS`."""
    command = ["helm", "template", "plait", str(CHART), "--namespace", "default", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def golden_text(example: Path) -> str:
    """The golden file's content. Raises `RuntimeError` with helm's message."""
    done = render("-f", str(example))
    if done.returncode != 0:
        raise RuntimeError(f"{example.name}: {done.stderr.strip()}")
    lines = (line.rstrip() for line in done.stdout.splitlines())
    return head(example) + "\n".join(line for line in lines if line) + "\n"


def main() -> int:
    """Write all golden files; the exit code."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for example in sorted(EXAMPLES.glob("*.yaml")):
        (GOLDEN / example.name).write_text(golden_text(example))
    return 0


if __name__ == "__main__":
    sys.exit(main())
