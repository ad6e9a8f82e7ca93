"""The page of results says of the scheduler what its results file says."""

from __future__ import annotations

import json

import msgspec
from bench.scheduler import pressure_docs
from bench.scheduler.results_docs import DOC, RESULT, Result, goals, section, with_section
from plait.bench.result_file import Row

MEASURED = Row("decision, 64 replicas by function call", "p50", "seconds", 6e-7, 5e-6)


def test_the_page_says_what_the_results_file_says() -> None:
    page = DOC.read_text(encoding="utf-8")
    assert with_section(page, RESULT.read_bytes()) == page


def test_the_page_says_what_the_files_of_pressure_say() -> None:
    page = DOC.read_text(encoding="utf-8")
    assert pressure_docs.with_section(page) == page


def test_a_figure_that_is_not_reached_is_named() -> None:
    slow = msgspec.structs.replace(MEASURED, case="slow", value=6e-6)
    few = Row("properties", "plans_per_second", "plans/s", 9e4, 1e5)
    assert goals(Result(None, {}, [MEASURED])) == "All 1 figures that the design asks for are reached."
    words = goals(Result(None, {}, [MEASURED, slow, few]))
    assert words.startswith("1 of 3 figures")
    assert words.endswith("not: slow: p50 6 us; properties: plans_per_second 90,000 plans/s.")


def test_every_figure_of_the_file_stands_on_the_page() -> None:
    case = "plan + advance, 256 decoders, context 8192, cache full"
    rows = [MEASURED, Row(case, "p50", "seconds", 1.123e-5, 4e-5), Row(case, "p99", "seconds", 3.04e-5, None)]
    rows += [Row(case, "instructions", "instructions", 151_784.0, None), Row("encode", "bytes", "bytes", 2125.0, 4e3)]
    made = json.dumps({"commit": "abc", "machine": {"cpu": "x", "cores": 2}, "rows": msgspec.to_builtins(rows)})
    said = section(made.encode())
    for figure in ("| 256 | 40 | 11.2 (30.4) |", "| 256 |  | 152 |", "0.6 us | 5 us |", "2,125 bytes | 4,000 bytes |"):
        assert figure in said, said
