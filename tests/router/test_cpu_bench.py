"""The CPU bench: servers alternate, absent ones are named, nothing is left running, documents quote the file."""

from __future__ import annotations

import os
import signal
import statistics
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from bench.cpu import results_docs
from bench.cpu.contestants import GGUF_FORMS, Contestant, Places, vllm_cpu, with_the_same_files
from bench.cpu.cpu_cases import beside_busy, closed_loop
from bench.cpu.cpu_report import encode, goal_over_peer, is_beside, report
from bench.cpu.interleave import Field, run_all
from plait.bench.result_file import Row

pytestmark = pytest.mark.process
TESTS = Path(results_docs.__file__).parents[2]
MOCK = """
import sys
from plait_testing.mock_server import MockServer, Timing
MockServer(Timing({timing}), int(sys.argv[1])).serve()
"""
PRESS = """
import os, signal, socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
asking = listener.accept()
os.kill({pid}, {signal})
signal.pause()
"""
ALONE = closed_loop(num_streams=1, input_len=16, per_stream=2, repeats=2)
CASES = [ALONE, beside_busy(ALONE, seconds=5.0, repeats=1)]


def mock(name: str, timing: str) -> Contestant:
    """A server that keeps time."""
    command = [sys.executable, "-c", MOCK.format(timing=timing), "{port}"]
    return Contestant(name, "time", command, environment={"PYTHONPATH": str(TESTS)}, ready="/v1/models")


def script(name: str, code: str) -> Contestant:
    return Contestant(name, "", [sys.executable, "-c", code, "{port}"])


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Field:
    """What one bench of two mocks, a peer that breaks and one that is not there has measured."""
    servers = [
        mock("plait", "ttft=0.004, itl=0.001"),
        mock("llama-server", "ttft=0.02, itl=0.004"),
        script("vllm-cpu", "print('loading'); print('no such model'); raise SystemExit(3)"),
        Contestant("transformers", missing="install it"),
    ]
    return run_all(servers, CASES, tmp_path_factory.mktemp("logs"))


def result(field: Field) -> results_docs.Result:
    return results_docs.read(encode(report(field, CASES, "a test")))


def test_servers_take_turns_and_the_order_alternates(field: Field) -> None:
    alone = [(run.repeat, run.server) for run in field.runs if run.case == ALONE.name]
    assert alone == [(0, "plait"), (0, "llama-server"), (1, "llama-server"), (1, "plait")]


def test_every_run_its_median_and_the_ratio_to_the_peer_are_in_the_file(field: Field) -> None:
    made = result(field)
    cases = {row.case for row in made.rows}
    assert {f"{ALONE.name} | plait", f"{ALONE.name} | plait | run 1", f"{ALONE.name} | plait | run 2"} <= cases
    speeds = [
        [made.value(ALONE.name, f"{server} | run {run}", "output_tokens_per_second") or 0.0 for run in (1, 2)]
        for server in ("plait", "llama-server")
    ]
    ratio = made.value(ALONE.name, "plait over llama-server", "ratio_output_tokens_per_second_median")
    assert ratio == pytest.approx(statistics.fmean(ours / theirs for ours, theirs in zip(*speeds, strict=True)))
    memory = made.value(ALONE.name, "plait", "memory_peak_rss")
    assert memory is not None
    assert memory > 1e6
    assert made.value(CASES[1].name, "plait", "speed_kept") is not None


def test_a_peer_that_is_not_there_and_one_that_breaks_are_named_with_their_reasons(field: Field) -> None:
    states = {server.name: (server.state, server.reason) for server in result(field).servers}
    assert states["plait"] == ("ran", "")
    assert states["transformers"] == ("missing", "install it")
    state, reason = states["vllm-cpu"]
    assert state == "failed"
    assert "ended with 3 before it was ready: no such model" in reason
    table = results_docs.table(encode(report(field, CASES, "a test")))
    assert "- transformers: **missing**: install it" in table
    assert "- vllm-cpu: **failed**: " in table


def test_a_server_that_broke_in_a_later_case_is_named_once_with_its_figures(field: Field) -> None:
    made = result(field)
    servers = [
        msgspec.structs.replace(one, state="failed", reason="gone") if one.name == "llama-server" else one
        for one in made.servers
    ]
    *table, _, words = results_docs.performance_section(msgspec.structs.replace(made, servers=servers)).splitlines()
    assert "llama-server" in table[0]
    assert "vllm-cpu" not in table[0]
    assert words.endswith("Not measured: vllm-cpu, transformers. Failed in a later case: llama-server.")


def test_a_python_without_vllm_is_missing_whatever_it_says(tmp_path: Path) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexit 3\n")
    silent.chmod(0o755)
    one = vllm_cpu(tmp_path, Places(None, silent, tmp_path, 1))
    assert one.missing == f"{silent} has no vllm-cpu: it ended with 3"


@pytest.mark.parametrize(
    ("ours", "server", "goal"),
    [
        ("plait", "llama-server Q4_1", 1.0),
        ("plait Q8_0", "llama-server Q8_0", 1.2),
        ("plait Q8_0", "llama-server Q4_K_M", None),
        ("plait Q8_0", "vllm-cpu", None),
        ("plait", "plait Q8_0", None),
    ],
)
def test_a_file_that_both_serve_is_held_against_the_same_file(ours: str, server: str, goal: float | None) -> None:
    assert is_beside(ours, server) == (goal is not None)
    if goal is not None:
        assert goal_over_peer("512/64 @ 1", server, "output_tokens_per_second", ours) == goal


def test_without_llama_cpps_programs_the_files_that_both_serve_are_missing(tmp_path: Path, demo_gguf: Path) -> None:
    made = with_the_same_files(Places(tmp_path / "llama-server", None, tmp_path / "models", 1))
    assert [one.name for one in made] == [f"{who} {form}" for form in GGUF_FORMS for who in ("plait", "llama-server")]
    assert {one.missing for one in made} == {
        "build llama-server and llama-quantize into one folder and give --llama-server PATH"
    }


def test_servers_end_with_the_bench(field: Field) -> None:
    assert field.runs
    assert servers_left() == []


def test_ctrl_c_leaves_no_server_behind(tmp_path: Path) -> None:
    """The second server sends it when it is asked whether it is ready, while the first is paused."""
    press = PRESS.format(pid=os.getpid(), signal=int(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run_all([mock("plait", ""), script("presses", press)], [ALONE], tmp_path)
    assert servers_left() == []


def servers_left() -> list[str]:
    """Processes below this one that were started as servers."""
    children = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    return [str(one) for one in children if any("MockServer" in word or "os.kill" in word for word in one.cmdline())]


@pytest.mark.parametrize(
    "page",
    [results_docs.README, results_docs.PERFORMANCE, results_docs.RESULTS_DOC],
    ids=["readme", "performance", "results"],
)
def test_a_page_says_what_the_results_file_says(page: Path) -> None:
    made = results_docs.RESULT.read_bytes() if results_docs.RESULT.exists() else None
    text = page.read_text(encoding="utf-8")
    assert results_docs.with_section(text, results_docs.sections(made)[page]) == text


def test_a_goal_that_is_missed_is_said_to_be_missed(field: Field) -> None:
    made = msgspec.structs.replace(
        result(field),
        rows=[
            Row("512/64 @ 8 | plait", "itl_p99", "seconds", 0.2, 0.15),
            Row("128/64 @ 8 | plait over llama-server", "ratio_itl", "ratio", 1.3, 1.2),
        ],
    )
    missed, met = results_docs.goals(made)
    assert "itl_p99 0.200, goal at most 0.15: **missed**" in missed
    assert "1.300, goal at least 1.2: met" in met
