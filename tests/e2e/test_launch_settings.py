"""`plait launch` on one node, with settings of `plait serve`."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from plait.restarts import restart_file_held
from plait_testing.running_server import spawn_server, wait_until_ready

ADMIN = re.compile(r"^\[node 0\] Admin listener: (\S+)$", re.MULTILINE)


def test_parsers_names_deadlines_and_the_admin_listener_are_as_of_plait_serve(
    tmp_path: Path, check_models: Path
) -> None:
    words = ["-m", "plait.cli", "launch", str(check_models / "recall-gqa"), "--port", "0", "--threads", "1"]
    words += [
        "--admin-port",
        "0",
        "--reasoning-parser",
        "qwen3",
        "--tool-parser",
        "hermes",
        "--metric-names",
        "plait,vllm",
    ]
    words += ["--request-timeout-seconds", "30", "--root-path", "/llm", "--max-model-len", "1024"]
    node = spawn_server(tmp_path / "node.log", *words)
    try:
        wait_until_ready(node)
        assert node.url, node.errors
        assert "vllm:num_requests_running" in httpx.get(f"{node.url}/metrics").text
        (admin,) = ADMIN.findall(node.errors)
        found = httpx.get(f"{admin}/admin/settings", timeout=30).raise_for_status().text
        for name, value in (("reasoning_parser", "qwen3"), ("tool_parser", "hermes"), ("root_path", "/llm")):
            assert re.search(rf'"{name}": ?"{value}"', found), found
    finally:
        node.kill()


def test_a_restart_file_of_a_living_server_is_refused(tmp_path: Path, check_models: Path) -> None:
    file = tmp_path / "restarts"
    words = ["-m", "plait.cli", "launch", str(check_models / "recall-gqa"), "--port", "0", "--threads", "1"]
    with restart_file_held(str(file)):
        node = spawn_server(tmp_path / "node.log", *words, "--restart", "group", "--restart-file", str(file))
        try:
            assert node.wait() == 2
            assert f"--restart-file {file} counts the losses of a server that runs already" in node.last_line
        finally:
            node.kill()
