"""`--log-json`: each line that a server and its ranks write on standard error is a JSON object."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
from plait_testing.json_log import read_json_lines
from plait_testing.running_server import start_server


def test_every_line_of_a_server_is_an_object_and_the_request_is_found_by_its_id(
    check_models: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-first\n")
    keys.chmod(0o600)
    flags = ["--threads", "1", "--log-json", "--enable-log-requests", "--api-key-file", str(keys)]
    server = start_server(tmp_path / "log", check_models / "recall-gqa", *flags)
    try:
        head = {"authorization": "Bearer sk-first", "x-request-id": "told-1"}
        asked = {"model": "recall-gqa", "prompt": "count 1 9", "max_tokens": 4}
        answer = httpx.post(server.url + "/v1/completions", json=asked, headers=head, timeout=60)
        # Lines of no logger: the stacks of a rank's threads.
        os.kill(server.workers()[0].pid, signal.SIGUSR2)
    finally:
        server.stop()
    lines = read_json_lines(server.errors)
    assert {"engine", "http", "rank 0"} <= {line["source"] for line in lines}
    assert any(line["source"] == "rank 0" and "most recent call first" in line["message"] for line in lines)
    [told] = [line for line in lines if line.get("request_id") == "told-1"]
    usage = answer.json()["usage"]
    assert (told["level"], told["status"], told["path"], told["end"]) == ("INFO", 200, "/v1/completions", "whole")
    assert (told["prompt_tokens"], told["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert told["seconds"] >= told["head_seconds"] >= 0


def test_the_last_line_of_a_failed_start_is_an_object_too(check_models: Path, tmp_path: Path) -> None:
    server = start_server(tmp_path / "log", check_models / "recall-gqa", "--log-json", "--max-seqs", "0")
    assert server.wait() == 2
    [line] = read_json_lines(server.errors)
    assert (line["level"], line["source"]) == ("ERROR", "plait")
    assert "--max-seqs" in line["message"]
