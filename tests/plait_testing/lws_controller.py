"""The controller of LeaderWorkerSet and its webhooks, beside a control plane on loopback."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import yaml

from plait_testing.control_plane import ControlPlane, free_ports, wait_for

_SUBJECT = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
_OF_LWS_PODS = {"matchExpressions": [{"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}]}


def start_lws_controller(plane: ControlPlane) -> None:
    """Returns once its webhooks answer; the control plane ends it. Its definition must be there."""
    port, health = free_ports(2)
    folder = plane.folder / "lws"
    folder.mkdir()
    certificate = make_certificate(folder)
    config = {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "webhook": {"port": port, "host": "127.0.0.1", "certDir": str(folder)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    flags = [f"--config={folder}/config.yaml", f"--kubeconfig={plane.kubeconfig}"]
    plane.spawn("lws", [str(plane.tools / "lws"), *flags])
    plane.apply(webhooks(plane.tools / "lws-webhooks.yaml", port, certificate))
    probe = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "metadata": {"name": "probe"}}
    probe["spec"] = {"leaderWorkerTemplate": {"size": 1, "workerTemplate": {"spec": {"containers": []}}}}
    words = ("apply", "--server-side", "--dry-run=server", "--filename=-")
    wait_for(
        lambda: "failed calling webhook" not in plane.try_kubectl(*words, text=yaml.safe_dump(probe)).stderr,
        "the webhooks of LeaderWorkerSet",
        plane.log,
    )


def make_certificate(folder: Path) -> str:
    """Of the webhooks' address, in base64; key and certificate lie in the folder."""
    files = ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *files, *_SUBJECT]
    subprocess.run(command, check=True, capture_output=True)
    return base64.b64encode((folder / "tls.crt").read_bytes()).decode()


def webhooks(path: Path, port: int, certificate: str) -> str:
    """The project's own, on loopback; those of pods are for its pods alone, as its installation has them."""
    documents = list(yaml.safe_load_all(path.read_text()))
    for document in documents:
        for hook in document["webhooks"]:
            url = f"https://127.0.0.1:{port}{hook['clientConfig']['service']['path']}"
            hook["clientConfig"] = {"url": url, "caBundle": certificate}
            if hook["rules"][0]["resources"] == ["pods"]:
                hook["objectSelector"] = _OF_LWS_PODS
    text: str = yaml.safe_dump_all(documents)
    return text
