"""The JSON of an API server, as a kubelet and a proxy read it."""

from __future__ import annotations

import datetime
from typing import Any, Protocol

import httpx

from plait_testing.control_plane import TOKEN, ControlPlane


class PodApi(Protocol):
    """What a kubelet asks: lists and Secrets by their paths, a pod's status, events of it, and its end."""

    def get(self, path: str) -> Any: ...

    def has(self, path: str) -> bool: ...

    def say_event(self, pod: dict[str, Any], reason: str, message: str) -> None: ...

    def patch_status(self, path: str, status: dict[str, object]) -> None: ...

    def delete_now(self, path: str) -> None: ...


class Api:
    """Of a control plane, with an administrator's rights."""

    def __init__(self, plane: ControlPlane) -> None:
        self._client = httpx.Client(
            base_url=plane.url, verify=False, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30
        )

    def get(self, path: str) -> Any:
        return self._client.get(path).raise_for_status().json()

    def has(self, path: str) -> bool:
        answer = self._client.get(path)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return False
        answer.raise_for_status()
        return True

    def say_event(self, pod: dict[str, Any], reason: str, message: str) -> None:
        """A warning of a kubelet about a pod."""
        about, now = pod["metadata"], datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        named = {"kind": "Pod", "apiVersion": "v1"} | {key: about[key] for key in ("name", "namespace", "uid")}
        event = {
            "metadata": {"generateName": f"{about['name']}."},
            "involvedObject": named,
            "reason": reason,
            "message": message,
            "type": "Warning",
            "source": {"component": "kubelet"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        self._client.post(f"/api/v1/namespaces/{about['namespace']}/events", json=event).raise_for_status()

    def patch_status(self, path: str, status: dict[str, object]) -> None:
        """None there any more is none to patch."""
        headers = {"Content-Type": "application/strategic-merge-patch+json"}
        self._client.patch(f"{path}/status", json={"status": status}, headers=headers)

    def delete_now(self, path: str) -> None:
        self._client.request("DELETE", path, json={"gracePeriodSeconds": 0})
