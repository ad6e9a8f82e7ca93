"""Both listeners are what they describe: requests that schemathesis makes of them, right ones and wrong ones.

schemathesis comes with the test dependencies.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from plait_testing.running_server import Server, start_server

EACH = """
[[operations]]
include-method = ["POST", "PUT"]
checks.positive_data_acceptance.enabled = false
"""
"""Ranges over several fields are not described, so a body that the description allows may be refused."""
REDUCED = """
[[operations]]
include-method = "POST"
exclude-path-regex = '^/(detokenize|v1/responses/input_tokens|v1/messages/count_tokens)$'
phases.coverage.enabled = false

[[operations]]
include-method = "POST"
phases.coverage.generation.mode = "negative"
"""
"""Bounds are tried on paths that read the bodies of others which generate, and answer at once."""
ADMIN_LINE = "Admin listener: "


@pytest.fixture(scope="module")
def described(
    description_tools: None, check_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server whose answers end soon: its context is short."""
    limits = ("--max-model-len", "128", "--max-queue", "32", "--max-seqs", "16", "--admin-port", "0")
    log = tmp_path_factory.mktemp("server") / "server.log"
    one = start_server(log, check_models / "recall-gqa", *limits, "--threads", "1")
    assert one.url, one.errors
    yield one
    one.kill()


@pytest.fixture(scope="module")
def admin_url(described: Server) -> str:
    """The admin listener's."""
    return described.read_line(ADMIN_LINE).removeprefix(ADMIN_LINE).rstrip("/")


def held_to_its_description(url: str, folder: Path, config: str, *options: str) -> str:
    """What schemathesis reports of all its checks; the test fails if it found anything.

    One run has all phases: half a run's time is its start.
    """
    (folder / "schemathesis.toml").write_text(config)
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{url}/openapi.json"]
    always = ["--phases", "coverage,fuzzing", "--seed", "1", "--request-timeout", "120", "--continue-on-failure"]
    found = subprocess.run([*command, *always, *options], cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "passed" in found.stdout
    return found.stdout


def num_tested(said: str) -> int:
    found = re.search(r"Tested: +(\d+)\n", said)
    assert found, said
    return int(found[1])


def num_operations(url: str) -> int:
    return sum(map(len, described_by(url)["paths"].values()))


def described_by(url: str) -> dict[str, Any]:
    document: dict[str, Any] = httpx.get(f"{url}/openapi.json", timeout=60).json()
    return document


def test_every_path_answers_as_described_and_refuses_what_is_not(
    described: Server, tmp_path: Path, sized: Callable[[int, int], int]
) -> None:
    """Each bound of a body is refused past it, and paths without a body take all that they describe."""
    config = EACH + sized(1, 0) * REDUCED
    said = held_to_its_description(
        described.url, tmp_path, config, "--include-path-regex", ".", "-n", str(sized(3, 200))
    )
    assert num_tested(said) == num_operations(described.url)


def test_the_admin_listener_answers_as_described_and_refuses_what_is_not(
    described: Server, admin_url: str, tmp_path: Path, sized: Callable[[int, int], int]
) -> None:
    """Two operations have a test of their own: events have no end, and a drain ends the server."""
    others = ("--include-path-regex", "^/(?!admin/(events|drain)$)")
    said = held_to_its_description(admin_url, tmp_path, EACH, *others, "-n", str(sized(3, 200)))
    assert num_tested(said) == num_operations(admin_url) - 2


def test_events_are_as_the_admin_listener_describes_them(admin_url: str) -> None:
    document = described_by(admin_url)
    told = document["paths"]["/admin/events"]["get"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    schema = {"$ref": told["description"].rpartition(" ")[2], "components": document["components"]}
    with httpx.stream("GET", f"{admin_url}/admin/events", timeout=60) as events:
        view = json.loads(next(events.iter_lines()).removeprefix("data: "))
    assert [error.message for error in Draft202012Validator(schema).iter_errors(view)] == []


@pytest.mark.parametrize("wrong", [[], "now", {"deadline_seconds": "1"}, {"deadline_seconds": -1}, {"deadline": 1}])
def test_a_drain_that_is_not_described_does_not_begin(described: Server, admin_url: str, wrong: Any) -> None:
    document = described_by(admin_url)
    body = document["paths"]["/admin/drain"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert not Draft202012Validator(body | {"components": document["components"]}).is_valid(wrong)
    assert httpx.post(f"{admin_url}/admin/drain", json=wrong, timeout=60).status_code == 400
    httpx.post(f"{admin_url}/admin/resume", timeout=60).raise_for_status()
    assert described.wait_until_serving()["status"] == "ok"
