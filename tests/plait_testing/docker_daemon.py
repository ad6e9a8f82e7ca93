"""A Docker daemon of its own in namespaces, where its ports and rules of the firewall stay. It needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from plait_testing.control_plane import wait_for
from plait_testing.node_network import reason_without_namespaces

_PROGRAMS = ("docker", "dockerd", "containerd", "runc", "buildah")


def reason_without_docker() -> str:
    """Why this machine runs no daemon for a test; empty if it does."""
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"no {', '.join(missing)}"
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0:
        return "no docker compose"
    return reason_without_namespaces()


class DockerDaemon:
    """Its images and containers go with it."""

    def __init__(self, namespace: str) -> None:
        """`namespace` is the network's, as `ip netns` names it."""
        self._folder = Path(tempfile.mkdtemp(prefix="plait-docker-"))
        self._namespace = namespace
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DockerDaemon:
        folders = [f"--{name}-root={self._folder / name}" for name in ("data", "exec")]
        words = ["dockerd", *folders, f"--pidfile={self._folder / 'pid'}", f"--host={self._host}"]
        with self._log.open("wb") as said:
            command = ["nsenter", f"--net=/run/netns/{self._namespace}", "unshare", "--mount", *words]
            process = self._process = subprocess.Popen(command, stdout=said, stderr=said)
        is_up = ["info", "--format={{.ServerVersion}}"]
        wait_for(lambda: process.poll() is not None or self.run(*is_up).returncode == 0, "dockerd", self._log.read_text)
        assert process.poll() is None, self._log.read_text()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()  # it ends its containers
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _host(self) -> str:
        return f"unix://{self._folder / 'socket'}"

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`docker WORDS`."""
        environment = os.environ | {"DOCKER_HOST": self._host}
        return subprocess.run(["docker", *words], env=environment, capture_output=True, text=True, check=False)

    def load(self, image: str, name: str) -> None:
        """`image` of buildah's store, under another name."""
        archive = self._folder / "image.tar"
        subprocess.run(["buildah", "push", "--quiet", image, f"docker-archive:{archive}:{name}"], check=True)
        done = self.run("load", "--quiet", f"--input={archive}")
        assert done.returncode == 0, done.stderr
        archive.unlink()
