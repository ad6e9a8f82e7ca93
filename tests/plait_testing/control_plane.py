"""A real Kubernetes control plane on loopback: etcd, API server, controller-manager, scheduler; no kubelet.

`tests/deploy/cluster/build_tools.sh` builds the binaries; etcd and kubectl are the machine's own.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

TOKEN = "plait-test"
START_SECONDS = 120.0
ISSUER = "https://kubernetes.default.svc"


@dataclass
class ControlPlane:
    """The processes, and `kubectl` against them."""

    tools: Path
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    port: int = 0
    """Of the API server, on loopback."""

    def start(self) -> None:
        """Returns when the API server is ready and has its default namespace."""
        etcd, peer, self.port = free_ports(3)
        self._write_files()
        self.spawn(
            "etcd",
            [
                "etcd",
                f"--data-dir={self.folder}/etcd",
                f"--listen-client-urls=http://127.0.0.1:{etcd}",
                f"--advertise-client-urls=http://127.0.0.1:{etcd}",
                f"--listen-peer-urls=http://127.0.0.1:{peer}",
                "--unsafe-no-fsync",
            ],
        )
        self.spawn("apiserver", [*self._kube("apiserver"), *self._api_flags(etcd)])
        wait_for(lambda: self.try_kubectl("get", "--raw", "/readyz").returncode == 0, "the API server", self.log)
        self.spawn("controller-manager", [*self._kube("controller-manager"), *self._manager_flags()])
        flags = [f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--secure-port=0"]
        self.spawn("scheduler", [*self._kube("scheduler"), *flags])
        wait_for(
            lambda: self.try_kubectl("get", "serviceaccount", "default").returncode == 0, "the namespace", self.log
        )

    def stop(self) -> None:
        """End all processes, the last one first."""
        for process in reversed(self.processes):
            process.terminate()
            process.wait()

    @property
    def url(self) -> str:
        """The API server's."""
        return f"https://127.0.0.1:{self.port}"

    @property
    def kubeconfig(self) -> Path:
        """An administrator's."""
        return self.folder / "kubeconfig"

    def log(self) -> str:
        """The last lines of each process."""
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def try_kubectl(self, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """`kubectl WORDS`, with `text` on its standard input."""
        command = ["kubectl", f"--kubeconfig={self.kubeconfig}", *words]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    def kubectl(self, *words: str, text: str | None = None) -> str:
        """Its output; asserts that it succeeds."""
        done = self.try_kubectl(*words, text=text)
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout

    def get(self, *words: str) -> Any:
        """An object, or a list's items."""
        found = json.loads(self.kubectl("get", *words, "--output=json"))
        return found.get("items", found)

    def apply(self, text: str) -> str:
        """Server-side, with unknown and doubled fields refused."""
        return self.kubectl("apply", "--server-side", "--validate=strict", "--filename=-", text=text)

    def patch_status(self, kind: str, name: str, status: dict[str, object]) -> None:
        """As a kubelet or another controller does."""
        patch = json.dumps({"status": status})
        self.kubectl("patch", kind, name, "--subresource=status", "--type=strategic", f"--patch={patch}")

    def _kube(self, component: str) -> list[str]:
        return [str(self.tools / "kube"), component]

    def _api_flags(self, etcd: int) -> Iterator[str]:
        yield f"--etcd-servers=http://127.0.0.1:{etcd}"
        yield f"--secure-port={self.port}"
        yield "--bind-address=127.0.0.1"
        yield f"--cert-dir={self.folder}"
        yield f"--token-auth-file={self.folder}/tokens.csv"
        yield f"--service-account-issuer={ISSUER}"
        yield f"--service-account-key-file={self.folder}/accounts.key"
        yield f"--service-account-signing-key-file={self.folder}/accounts.key"
        yield "--service-cluster-ip-range=10.96.0.0/16"
        yield "--authorization-mode=Node,RBAC"
        yield "--enable-admission-plugins=NodeRestriction,PodSecurity"

    def _manager_flags(self) -> Iterator[str]:
        yield f"--kubeconfig={self.kubeconfig}"
        yield f"--service-account-private-key-file={self.folder}/accounts.key"
        yield f"--root-ca-file={self.folder}/apiserver.crt"
        yield "--leader-elect=false"
        yield "--use-service-account-credentials=true"
        yield "--horizontal-pod-autoscaler-sync-period=2s"
        yield "--secure-port=0"  # another test's plane may run beside this one
        yield "--node-monitor-grace-period=1h"  # nobody sends a node's heartbeats

    def _write_files(self) -> None:
        key = self.folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        (self.folder / "tokens.csv").write_text(f"{TOKEN},admin,admin,system:masters\n")
        cluster = {"server": self.url, "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(json.dumps(config))

    def spawn(self, name: str, words: list[str]) -> None:
        """A process that ends with the others; its output is in a log of its name."""
        log: IO[bytes]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes.append(subprocess.Popen(words, stdout=log, stderr=log))


def missing_tool(tools: Path) -> str | None:
    """What the control plane lacks, in words."""
    for name in ("etcd", "kubectl", "openssl"):
        if shutil.which(name) is None:
            return f"no {name} (Debian's package {'etcd-server' if name == 'etcd' else name})"
    missing = [
        name
        for name in ("kube", "crds", "lws", "lws-webhooks.yaml", "epp", "keda", "keda-adapter")
        if not (tools / name).exists()
    ]
    if missing:
        return f"no {missing[0]} in {tools}; run tests/deploy/cluster/build_tools.sh {tools}"
    return None


def free_ports(count: int) -> list[int]:
    """Different ones, on loopback."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait_for(
    is_true: Callable[[], object], what: str, describe: Callable[[], object] = str, seconds: float = START_SECONDS
) -> None:
    """Returns once it is; fails after `seconds` with what `describe` says."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"{what} did not come in {seconds} s: {describe()}"
        time.sleep(0.2)
