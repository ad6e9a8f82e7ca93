"""The server is what its description says: requests that schemathesis makes of it, right ones and wrong ones.

schemathesis comes with the test dependencies.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from plait_testing.running_server import Server, start_server

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "negative_data_rejection",
)
WITHOUT_OUTPUT = r"^/(detokenize|v1/responses/input_tokens|v1/messages/count_tokens)$"
"""Paths that read the bodies of others which generate, and answer at once."""


@pytest.fixture(scope="module")
def described(
    description_tools: None, check_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server whose answers end soon: its context is short."""
    limits = ("--max-model-len", "128", "--max-queue", "32", "--max-seqs", "16")
    log = tmp_path_factory.mktemp("server") / "server.log"
    one = start_server(log, check_models / "recall-gqa", *limits, "--threads", "1")
    assert one.url, one.errors
    yield one
    one.kill()


def held_to_its_description(server: Server, folder: Path, *options: str, checks: tuple[str, ...] = CHECKS) -> str:
    """What schemathesis reports; the test fails if it found anything."""
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{server.url}/openapi.json"]
    always = ["--checks", ",".join(checks), "--seed", "1", "--request-timeout", "120", "--continue-on-failure"]
    found = subprocess.run([*command, *always, *options], cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "passed" in found.stdout
    return found.stdout


def test_every_path_answers_as_described_and_refuses_what_is_not(
    described: Server, tmp_path: Path, sized: Callable[[int, int], int]
) -> None:
    said = held_to_its_description(
        described, tmp_path, "--include-path-regex", ".", "--phases", "fuzzing", "-n", str(sized(3, 200))
    )
    paths = httpx.get(f"{described.url}/openapi.json", timeout=60).json()["paths"]
    assert re.search(rf"Tested: +{sum(map(len, paths.values()))}\n", said), said


def test_each_bound_of_a_body_is_refused_past_it(
    described: Server, tmp_path: Path, sized: Callable[[int, int], int]
) -> None:
    only = sized(1, 0) * ["--include-path-regex", WITHOUT_OUTPUT]
    held_to_its_description(described, tmp_path, "--phases", "coverage", *only)


def test_paths_without_a_body_take_all_that_they_describe(described: Server, tmp_path: Path) -> None:
    held_to_its_description(described, tmp_path, "--include-method", "GET", "-n", "5", checks=("all",))
