"""The JSON of an API server, as a kubelet and a proxy read it."""

from __future__ import annotations

from typing import Any, Protocol

import httpx

from plait_testing.control_plane import TOKEN, ControlPlane


class PodApi(Protocol):
    """What a kubelet asks: lists and secrets by their paths, a pod's status, and its end."""

    def get(self, path: str) -> Any: ...

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

    def patch_status(self, path: str, status: dict[str, object]) -> None:
        """None there any more is none to patch."""
        headers = {"Content-Type": "application/strategic-merge-patch+json"}
        self._client.patch(f"{path}/status", json={"status": status}, headers=headers)

    def delete_now(self, path: str) -> None:
        self._client.request("DELETE", path, json={"gracePeriodSeconds": 0})
