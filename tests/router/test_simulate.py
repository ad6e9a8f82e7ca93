"""`plait simulate`: from words on the command line to figures, files and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from plait import cli
from plait.simulate.command import run
from plait.simulate.settings import LoadSettings, SimulateSettings
from plait_proto import ExitCode

SMALL = ("simulate", "--rate", "20", "--num-prompts", "60", "--input-len", "900", "--output-len", "30")
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"


def figures(folder: Path) -> dict[str, object]:
    summary: dict[str, object] = json.loads((folder / "summary.json").read_bytes())
    return summary


def test_the_figures_are_printed_in_milliseconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(list(SMALL)) == 0
    printed = capsys.readouterr().out
    assert printed.split("\n")[0].split() == ["p50", "p90", "p99", "max"]
    (itl,) = re.findall(r"^ITL, ms((?: +[\d.,]+){4})$", printed, re.MULTILINE)
    shortest, *_, longest = (float(time) for time in itl.split())
    assert 3 < shortest < longest < 1000
    assert "60 (0 refused)" in printed


def test_out_gets_figures_and_plots_of_both_modes(tmp_path: Path) -> None:
    assert cli.run([*SMALL, "--itl-target-ms", "20", "--out", str(tmp_path / "new")]) == 0
    summary = figures(tmp_path / "new")
    percentiles = {"p50", "p90", "p99", "max"}
    assert all(set(summary[f"{name}_seconds"]) == percentiles for name in ("ttft", "itl", "e2e"))  # type: ignore[call-overload]
    named = {"output_tokens_per_second", "mixed_share", "prefix_hit_ratio", "num_preemptions", "settings"}
    assert named <= set(summary)
    for plot in ("composition", "itl_tail", "mixed"):
        assert (tmp_path / "new" / f"{plot}.png").read_bytes().startswith(b"\x89PNG")


def test_the_settings_stand_beside_the_figures_as_they_were_used(tmp_path: Path) -> None:
    cli.run([*SMALL, "--max-batch-tokens", "512", "--out", str(tmp_path)])
    settings = figures(tmp_path)["settings"]
    assert isinstance(settings, dict)
    assert settings["max_batch_tokens"] == settings["long_prefill_token_threshold"] == 512
    assert settings["num_pages"] > 0
    assert (settings["hardware"], settings["rate"]) == ("h200", 20.0)


def test_a_played_file_has_no_synthetic_arrivals_beside_its_figures(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(AZURE)
    cli.run(["simulate", "--trace", str(trace), "--out", str(tmp_path)])
    settings = figures(tmp_path)["settings"]
    assert isinstance(settings, dict)
    assert settings["trace"] == str(trace)
    assert not {"rate", "num_prompts", "input_len", "output_len", "seed"} & set(settings)


def test_the_same_settings_give_the_same_figures() -> None:
    settings = SimulateSettings(load=LoadSettings(num_prompts=50, rate=30.0))
    assert run(settings, "once") == run(settings, "again")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--trace", "there-is-none.csv"], "there-is-none.csv cannot be read: No such file"),
        (["--trace", "x.parquet"], "--trace is x.parquet; a trace ends in .csv"),
        (["--model", "x"], "--model is x; allowed: qwen3-8b"),
        (["--replicas", "1025"], "--replicas is '1025'; allowed: a whole number from 1 to 1024"),
        (["--no-mixed", "--itl-target-ms", "9"], "--itl-target-ms is 9; without mixed steps"),
        (["--watermark", "4000000"], "--watermark is 4000000; it must leave a page"),
        (
            ["--max-batch-tokens", "64", "--long-prefill", "65"],
            "--long-prefill-token-threshold (--long-prefill) is 65; 1 to 64 are allowed",
        ),
        (["--out", "/dev/null/x"], "--out is '/dev/null/x', which cannot be a folder"),
    ],
)
def test_what_cannot_be_simulated_is_a_settings_error(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["simulate", *words]) == ExitCode.SETTINGS
    assert expected in capsys.readouterr().err


def test_a_broken_line_of_a_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(AZURE + "2023-11-16 18:15:47,many,44\n")
    assert cli.run(["simulate", "--trace", str(trace)]) == ExitCode.SETTINGS
    assert f'{trace}:3: ContextTokens is "many"; allowed: a whole number' in capsys.readouterr().err


def test_what_a_callback_raises_ends_the_simulation() -> None:
    import msgspec
    from plait._router import Simulation
    from plait.simulate.settings import simulator_settings

    def refuse(num_arrived: int) -> None:
        raise RuntimeError("enough")

    simulation = Simulation(msgspec.json.encode(simulator_settings(SimulateSettings())))
    with pytest.raises(RuntimeError, match="enough"):
        simulation.run(refuse)


def test_serving_with_a_target_needs_mixed_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", "--itl-target-ms", "50", "--no-mixed"]) == ExitCode.SETTINGS
    assert "--itl-target-ms needs mixed steps" in capsys.readouterr().err


def test_several_tenants_are_shown_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--trace", "flood", "--rate", "60", "--num-prompts", "300", "--policy", "fair"]
    assert cli.run([*words, "--out", str(tmp_path)]) == 0
    largest, others = capsys.readouterr().out.split("of fair share\n")[1].split("\n")[:2]
    assert re.match(r"0 +1\d\d +0 ", largest)
    assert re.match(r"\d+ others, worst +1\d\d +0 ", others)
    tenants = figures(tmp_path)["tenants"]
    assert isinstance(tenants, list)
    assert sum(tenant["num_requests"] for tenant in tenants) == 300
    assert figures(tmp_path)["settings"]["trace"] == "flood"  # type: ignore[index]


def test_requests_are_dealt_to_tenants(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*SMALL, "--tenants", "3"]) == 0
    shown = capsys.readouterr().out.split("of fair share\n")[1].split("\n")
    assert [line.split()[0] for line in shown if line] == ["0", "1", "2"]
