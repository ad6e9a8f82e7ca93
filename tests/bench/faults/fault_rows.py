"""Rows of the fault table: times by percentile, losses added up."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from plait.bench.percentiles import percentile
from plait.bench.result_file import commit, machine, versions

Result = Mapping[str, float]
Run = Callable[[], Result]
"""Strikes once."""
Fault = Callable[[Path], AbstractContextManager[Run]]
"""Starts what is struck, with its files in a folder, and ends it."""

LOSSES = ("wrong_streams", "lost_tokens", "repeated_tokens", "leaked_pages", "leaked_files", "orphans", "failures")
"""What must be 0."""


def row(results: Sequence[Result], **names: object) -> dict[str, object]:
    """One line of the table."""
    made: dict[str, object] = dict(names) | {"runs": len(results)}
    for name in results[0]:
        values = sorted(result[name] for result in results)
        if name.endswith(("_seconds", "_ratio")):
            made |= {f"{name}_p{p}": round(percentile(values, p), 3) for p in (50, 99)}
        else:
            made[name] = sum(values)
    return made


def write_record(file: Path | None, rows: Sequence[Mapping[str, object]], **facts: object) -> None:
    """`facts` says what else a reader must know."""
    if file is not None:
        record = {"commit": commit(), "machine": machine(), "versions": versions(), **facts, "rows": rows}
        file.write_text(json.dumps(record, indent=1) + "\n")
