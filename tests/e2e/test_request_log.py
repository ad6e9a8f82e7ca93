"""`--enable-log-requests` on a running server, from its `--config` file."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from plait_testing.running_server import start_server


def test_the_log_has_a_line_with_the_id_of_each_request(check_models: Path, tmp_path: Path) -> None:
    model = check_models / "recall-gqa"
    config = tmp_path / "plait.toml"
    config.write_text("threads = 1\nenable-log-requests = true\n")
    server = start_server(tmp_path / "log", model, "--config", str(config))
    try:
        asked = {"model": "recall-gqa", "prompt": "count 1 9", "max_tokens": 4}
        answers = [
            httpx.post(server.url + "/v1/completions", json=asked | {"stream": stream}, headers=named, timeout=60)
            for stream, named in ((False, {"x-request-id": "whole-1"}), (True, {}))
        ]
    finally:
        server.stop()
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert ids[0] == "whole-1"
    facts = re.findall(r"end=whole .* prompt_tokens=(\d+) output_tokens=(\d+) reason=(\w+) key=-", server.errors)
    usage = answers[0].json()["usage"]
    assert facts == 2 * [(str(usage["prompt_tokens"]), str(usage["completion_tokens"]), "length")]
    lines = re.findall(r'request_id=(\S+) method=POST path="/v1/completions" status=200 end=whole', server.errors)
    assert lines == ids
    assert "count 1 9" not in server.errors
