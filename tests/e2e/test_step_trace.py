"""The simulator's cost model is fitted to a server's step trace."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from plait import cli
from plait_testing.running_server import StartServer


def test_the_simulator_reads_what_the_server_wrote(
    check_models: Path, server: StartServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tmp_path / "steps.jsonl"
    running = server(check_models / "recall-gqa", "--step-trace", str(records))
    body = {"prompt": "count 1 9", "max_tokens": 12, "ignore_eos": True}
    assert httpx.post(f"{running.url}/v1/completions", json=body, timeout=120).status_code == 200
    running.stop()
    assert len(records.read_text().splitlines()) == 12
    load = ("--num-prompts", "5", "--input-len", "9", "--output-len", "12")
    room = ("--num-pages", "100", "--max-model-len", "1024")
    assert cli.run(["simulate", "--hardware", str(records), *room, *load]) == 0
    assert "5 (0 refused)" in capsys.readouterr().out


def test_a_file_that_is_there_already_ends_with_2_and_is_kept(
    check_models: Path, server: StartServer, tmp_path: Path
) -> None:
    taken = tmp_path / "notes"
    taken.write_text("mine")
    refused = server(check_models / "recall-gqa", "--step-trace", str(taken))
    assert refused.wait() == 2
    assert f"--step-trace {taken}: File exists" in refused.last_line
    assert "name a new file" in refused.last_line
    assert taken.read_text() == "mine"
