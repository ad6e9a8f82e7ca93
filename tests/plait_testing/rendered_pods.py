"""The pods of rendered manifests, as an API server would give them to a kubelet: no control plane is needed."""

from __future__ import annotations

import base64
import copy
import threading
from typing import Any

NAMESPACE = "default"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets/"


class RenderedPods:
    """Copies of a Deployment's pod on one node, and Secrets."""

    def __init__(self, deployment: dict[str, Any], num_pods: int, secrets: dict[str, dict[str, str]]) -> None:
        self._lock = threading.Lock()
        self._secrets = secrets
        self.statuses: dict[str, dict[str, Any]] = {}
        """The last one of each pod, by its path."""
        pods = (self._pod(deployment, number) for number in range(num_pods))
        self._pods = {f"{_PODS}/{pod['metadata']['name']}": pod for pod in pods}

    @staticmethod
    def _pod(deployment: dict[str, Any], number: int) -> dict[str, Any]:
        pod: dict[str, Any] = copy.deepcopy(deployment["spec"]["template"])
        name = f"{deployment['metadata']['name']}-{number}"
        pod["metadata"] |= {"name": name, "namespace": NAMESPACE, "uid": f"{number:08}-of-a-test"}
        pod["spec"]["nodeName"] = "node-0"
        return pod

    @property
    def paths(self) -> list[str]:
        """Of the pods that are there."""
        with self._lock:
            return list(self._pods)

    def delete(self, path: str) -> None:
        """As a client does: the pod goes once its kubelet has ended it."""
        with self._lock:
            self._pods[path]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    def get(self, path: str) -> Any:
        """All pods, or a Secret."""
        if path == _PODS:
            with self._lock:
                return {"items": copy.deepcopy(list(self._pods.values()))}
        data = self._secrets[path.removeprefix(_SECRETS)]
        return {"data": {key: base64.b64encode(text.encode()).decode() for key, text in data.items()}}

    def has(self, path: str) -> bool:
        return path.removeprefix(_SECRETS) in self._secrets

    def say_event(self, pod: dict[str, Any], reason: str, message: str) -> None:
        raise AssertionError(f"{pod['metadata']['name']}: {reason}: {message}")

    def patch_status(self, path: str, status: dict[str, object]) -> None:
        self.statuses[path] = status

    def delete_now(self, path: str) -> None:
        with self._lock:
            del self._pods[path]
