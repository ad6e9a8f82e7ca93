"""The compose file by `docker compose` itself: a server comes up healthy, comes back after a kill, and drains.

`make test-image` builds the image. The GPU that the file asks for is taken away, and the model is a check model.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from plait_testing import budgets
from plait_testing.control_plane import wait_for
from plait_testing.docker_daemon import DockerDaemon, reason_without_docker
from plait_testing.mini_kubelet import enter_network
from plait_testing.node_network import NodeNetwork

pytestmark = [pytest.mark.slow, pytest.mark.acceptance("image")]
FILE = budgets.ROOT / "deploy" / "compose.yaml"
SERVER = "localhost/plait"
KEY = "sk-test-of-docker-compose-0123456789abcdef"
ON_A_CPU = ["--device=cpu", "--threads=1", "--num-pages=64"]
SECONDS = 300.0


@dataclass(frozen=True)
class Project:
    """The file, with what this machine has in place of its GPU and model."""

    daemon: DockerDaemon
    network: NodeNetwork
    folder: Path

    def compose(self, *words: str, files: tuple[str, ...] = ("machine.yaml", "cpu.yaml")) -> tuple[int, str]:
        """The exit code and what it said."""
        given = [f"--file={path}" for path in (FILE, *(self.folder / name for name in files))]
        done = self.daemon.run("compose", "--progress=plain", *given, *words)
        return done.returncode, done.stdout + done.stderr

    def inspect(self, field: str) -> str:
        """Of the container."""
        _, container = self.compose("ps", "--all", "--quiet", "plait")
        return self.daemon.run("inspect", f"--format={{{{{field}}}}}", container.strip()).stdout.strip()

    def ask(self, key: str) -> int:
        """The status of an answer at the address that the file publishes."""
        (published,) = yaml.safe_load(FILE.read_text())["services"]["plait"]["ports"]
        url = f"http://{published.rpartition(':')[0]}/v1/models"
        with ThreadPoolExecutor(1, initializer=enter_network, initargs=(self.network, 0)) as clients:
            headers = {"Authorization": f"Bearer {key}"}
            return clients.submit(httpx.get, url, headers=headers, timeout=60, trust_env=False).result().status_code


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, check_models: Path) -> Iterator[Project]:
    """The image is loaded; nothing runs."""
    if missing := reason_without_docker():
        pytest.skip(missing)
    described = ["buildah", "inspect", "--type", "image", SERVER]
    if subprocess.run(described, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"no image {SERVER}; `make test-image` builds it")
    folder = tmp_path_factory.mktemp("compose")
    keys = folder / "keys.txt"
    keys.write_text(KEY)
    keys.chmod(0o640)
    service = yaml.safe_load(FILE.read_text())["services"]["plait"]
    os.chown(keys, 0, int(service["user"].split(":")[1]))  # as the file's first lines say
    models = {"type": "bind", "source": str(check_models), "target": "/models", "read_only": True}
    machine = {"services": {"plait": {"volumes": [models]}}, "secrets": {"keys": {"file": str(keys)}}}
    (folder / "machine.yaml").write_text(yaml.safe_dump(machine))
    (folder / "no-keys.yaml").write_text(yaml.safe_dump(machine | {"secrets": {"keys": {"file": "/nowhere/keys.txt"}}}))
    command = [word.replace("/models/Qwen3-8B", "/models/recall-gqa") for word in service["command"]]
    without = yaml.safe_dump({"services": {"plait": {"command": command + ON_A_CPU}}})
    (folder / "cpu.yaml").write_text(f"{without}    deploy: !reset null\n")
    with NodeNetwork(1) as network, DockerDaemon(network.namespace(0)) as daemon:
        daemon.load(SERVER, service["image"])
        one = Project(daemon, network, folder)
        yield one
        one.compose("kill")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("no-keys.yaml", "cpu.yaml"), "bind source path does not exist: /nowhere/keys.txt"),
        (("machine.yaml",), 'could not select device driver "nvidia" with capabilities: [[gpu]]'),
    ],
)
def test_what_is_missing_is_named(project: Project, files: tuple[str, ...], words: str) -> None:
    code, said = project.compose("up", "--detach", files=files)
    assert code != 0
    assert words in said
    assert words.split("/nowhere")[0] in (budgets.ROOT / "docs" / "deploying.md").read_text()
    project.compose("down")


def test_it_comes_up_healthy_comes_back_and_drains(project: Project) -> None:
    code, said = project.compose("up", "--detach", "--wait", f"--wait-timeout={SECONDS:.0f}")
    assert code == 0, said
    assert project.inspect(".State.Health.Status") == "healthy"
    assert [project.ask("another"), project.ask(KEY)] == [httpx.codes.UNAUTHORIZED, httpx.codes.OK]
    assert project.inspect(".HostConfig.ReadonlyRootfs") == "true"
    os.kill(int(project.inspect(".State.Pid")), signal.SIGKILL)
    wait_for(
        lambda: project.inspect(".RestartCount") == "1" and project.inspect(".State.Health.Status") == "healthy",
        "its return",
        lambda: project.compose("logs"),
        SECONDS,
    )
    assert project.ask(KEY) == httpx.codes.OK
    project.compose("stop")
    assert project.inspect(".State.ExitCode") == "0"
    assert project.compose("down", "--volumes")[0] == 0
