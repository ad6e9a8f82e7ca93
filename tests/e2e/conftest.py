"""Servers for end-to-end tests: real processes on real models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from plait.nodes.key_files import write_new_keys
from plait_testing.node_network import NodeNetwork, reason_without_namespaces
from plait_testing.running_server import Server, StartServer, start_server
from plait_testing.slow_steps import SlowSteps


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StartServer]:
    """`server(model, *flags)` starts a server (None: the demo model), which ends with the test at the latest."""
    started: list[Server] = []

    def start(model: Path | None, *flags: str) -> Server:
        started.append(start_server(tmp_path / f"server-{len(started)}.log", model, *flags))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.fixture
def network() -> Iterator[NodeNetwork]:
    """Two nodes."""
    if reason := reason_without_namespaces():
        pytest.skip(reason)
    with NodeNetwork(2) as made:
        yield made


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with the keys of two nodes."""
    write_new_keys(tmp_path / "keys", 2)
    return tmp_path / "keys"


@pytest.fixture
def slow_steps(tmp_path: Path) -> Iterator[SlowSteps]:
    """Slows the steps of the test's servers, from `begin` to `end`."""
    steps = SlowSteps(tmp_path)
    with steps.of_servers():
        yield steps


@pytest.fixture(scope="module")
def recall_steps(tmp_path_factory: pytest.TempPathFactory) -> SlowSteps:
    """Slows the steps of `recall_server`."""
    return SlowSteps(tmp_path_factory.mktemp("steps"))


@pytest.fixture(scope="module")
def recall_server(
    check_models: Path, recall_steps: SlowSteps, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server of recall-gqa that the tests of a module share."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    with recall_steps.of_servers():
        one = start_server(log, check_models / "recall-gqa", "--max-seqs", "16", "--threads", "2")
    assert one.url, one.errors
    yield one
    one.kill()
