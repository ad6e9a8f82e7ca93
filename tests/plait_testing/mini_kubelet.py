"""Plays kubelet to an API server: each pod is its command line in a network namespace of its own.

It runs init containers and the container's `args`, polls the probes, runs the sleep of preStop, ends a pod by SIGTERM
within its grace, starts it again where it ends by itself, and says all that in the pod's status. Volumes are folders;
their mount paths are replaced in the command line, since pods share the machine's files.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from plait_testing.kube_api import PodApi
from plait_testing.node_network import NodeNetwork, enter_namespace

_ROUND_SECONDS = 0.25


def enter_network(network: NodeNetwork, node: int) -> None:
    """Move this thread alone into the namespace: sockets that it opens belong there."""
    enter_namespace(network.namespace(node))


@dataclass
class Pod:
    """One pod that this kubelet runs."""

    manifest: dict[str, Any]
    node: int
    """Namespace of its own."""
    folder: Path
    started_at: float = field(default_factory=time.monotonic)
    restarts: int = 0
    is_started: bool = False
    """Whether the startup probe has passed."""
    is_ready: bool = False
    failures: dict[str, int] = field(default_factory=dict)
    """Of each probe, in a row."""
    next_probe: dict[str, float] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    ending: threading.Thread | None = None

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.manifest['metadata']['namespace']}/pods/{self.name}"

    @property
    def container(self) -> dict[str, Any]:
        found: dict[str, Any] = self.manifest["spec"]["containers"][0]
        return found

    @property
    def log(self) -> str:
        """What all its runs said."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def reset(self) -> None:
        """Before a run of its command."""
        self.is_started, self.is_ready, self.failures, self.next_probe = False, False, {}, {}


class MiniKubelet:
    """For all pods of a namespace that are bound to nodes; namespace 0 of the network is the clients'."""

    def __init__(
        self,
        api: PodApi,
        network: NodeNetwork,
        namespace: str,
        folder: Path,
        models: Path,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`sleep` is what preStop does."""
        self._api, self._sleep = api, sleep
        self._network, self._namespace, self._folder, self._models = network, namespace, folder, models
        self.pods: dict[str, Pod] = {}
        self.ended: list[Pod] = []
        self.messages: list[str] = []
        self._waiting: set[str] = set()
        """Pods whose Secrets are not there yet."""
        self._stop = threading.Event()
        self._probes = ThreadPoolExecutor(4, initializer=enter_network, initargs=(network, 0))
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> MiniKubelet:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for pod in self.pods.values():
            self._kill(pod, signal.SIGKILL)
        self._probes.shutdown()

    def _run(self) -> None:
        while not self._stop.wait(_ROUND_SECONDS):
            try:
                self._look_round()
            except httpx.HTTPError as error:  # a busy machine's API server may be late
                self.messages.append(f"the API server: {error!r}")

    def _look_round(self) -> None:
        listed = self._api.get(f"/api/v1/namespaces/{self._namespace}/pods")["items"]
        for manifest in listed:
            if "nodeName" in manifest["spec"] and (
                manifest["metadata"]["uid"] in self.pods or self._can_start(manifest)
            ):
                self._see(manifest)
        for uid in set(self.pods) - {manifest["metadata"]["uid"] for manifest in listed}:
            self.ended.append(self.pods.pop(uid))
        living = [pod for pod in self.pods.values() if pod.ending is None]
        for pod in living:
            self._start_again(pod)
        # The probing threads are in the clients' network, which does not reach the API server.
        for pod, has_changed in zip(living, self._probes.map(self._probe_all, living), strict=True):
            if has_changed:
                self._say(pod)

    def _can_start(self, manifest: dict[str, Any]) -> bool:
        """Whether all Secrets of its volumes are there. If not, its status and an event say so, once."""
        names = {one["name"]: one["secret"]["secretName"] for one in manifest["spec"]["volumes"] if "secret" in one}
        missing = [volume for volume, name in names.items() if not self._api.has(self._secret(name))]
        uid, path = manifest["metadata"]["uid"], Pod(manifest, 0, self._folder).path
        if missing and "deletionTimestamp" in manifest["metadata"]:
            self._api.delete_now(path)
        elif missing and uid not in self._waiting:
            self._waiting.add(uid)
            container = manifest["spec"]["containers"][0]
            state = {"name": container["name"], "image": container["image"], "imageID": "", "ready": False}
            state |= {"restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}}}
            self._api.patch_status(path, {"phase": "Pending", "containerStatuses": [state]})
            for volume in missing:
                message = f'MountVolume.SetUp failed for volume "{volume}" : secret "{names[volume]}" not found'
                self._api.say_event(manifest, "FailedMount", message)
        return not missing

    def _secret(self, name: str) -> str:
        return f"/api/v1/namespaces/{self._namespace}/secrets/{name}"

    def _see(self, manifest: dict[str, Any]) -> None:
        uid = manifest["metadata"]["uid"]
        if uid not in self.pods:
            used = {pod.node for pod in self.pods.values()}
            node = next(node for node in range(1, self._network.num_nodes) if node not in used)
            folder = self._folder / f"{manifest['metadata']['name']}-{uid[:8]}"
            folder.mkdir()
            self.pods[uid] = pod = Pod(manifest, node, folder)
            self._start(pod)
        pod = self.pods[uid]
        if "deletionTimestamp" in manifest["metadata"] and pod.ending is None:
            pod.ending = threading.Thread(target=self._end, args=(pod,))
            pod.ending.start()

    def _start(self, pod: Pod) -> None:
        pod.reset()
        pod.started_at = time.monotonic()
        for one in pod.manifest["spec"].get("initContainers", []) if pod.restarts == 0 else []:
            words = self._translate(pod, one, one["command"])
            subprocess.run(words, env=os.environ | self._environment(one), check=True)
        words = self._translate(pod, pod.container, pod.container["args"])
        log = (pod.folder / f"{pod.restarts}.log").open("wb")
        pod.process = subprocess.Popen(
            self._network.command(pod.node, "-m", "plait.cli", *words),
            env=os.environ | self._environment(pod.container),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self._say(pod)

    @staticmethod
    def _environment(container: dict[str, Any]) -> dict[str, str]:
        return {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}

    def _translate(self, pod: Pod, container: dict[str, Any], words: Iterable[str]) -> list[str]:
        """Variables, and mount paths as folders."""
        environment = self._environment(container)
        folders = {mount["mountPath"]: self._volume(pod, mount["name"]) for mount in container["volumeMounts"]}
        paths = re.compile("|".join(rf"{re.escape(path)}(?=/|$)" for path in folders))
        translated = []
        for word in words:
            for name, value in environment.items():
                word = word.replace(f"$({name})", value)
            translated.append(paths.sub(lambda found: str(folders[found[0]]), word))
        return translated

    def _volume(self, pod: Pod, name: str) -> Path:
        volume = next(one for one in pod.manifest["spec"]["volumes"] if one["name"] == name)
        if "persistentVolumeClaim" in volume:
            return self._models
        folder = pod.folder / name
        folder.mkdir(exist_ok=True)
        if "secret" in volume:
            secret = self._api.get(self._secret(volume["secret"]["secretName"]))
            for key, value in secret["data"].items():
                (folder / key).write_bytes(base64.b64decode(value))
                (folder / key).chmod(volume["secret"]["defaultMode"])
        return folder

    def _start_again(self, pod: Pod) -> None:
        """If its command has ended."""
        if pod.process is not None and pod.process.poll() is not None:
            self.messages.append(f"{pod.name} ended with {pod.process.returncode}")
            pod.restarts += 1
            self._start(pod)

    def _probe_all(self, pod: Pod) -> bool:
        """Run the probes that are due; whether the status changes. A pod without probes is ready as it starts."""
        before = (pod.is_started, pod.is_ready)
        if "startupProbe" not in pod.container:
            pod.is_started = pod.is_ready = True
            return before != (True, True)
        if not pod.is_started:
            pod.is_started = self._probe(pod, "startup") is True
        if pod.is_started:
            is_ready = self._probe(pod, "readiness")
            pod.is_ready = pod.is_ready if is_ready is None else is_ready
            if self._probe(pod, "liveness") is False:
                self._kill(pod, signal.SIGTERM)
        if not pod.is_started and pod.failures.get("startup", 0) >= pod.container["startupProbe"]["failureThreshold"]:
            self._kill(pod, signal.SIGTERM)
        return before != (pod.is_started, pod.is_ready)

    def _probe(self, pod: Pod, kind: str) -> bool | None:
        """Whether it passes or, after its failureThreshold, fails; None if nothing changes."""
        probe, now = pod.container[f"{kind}Probe"], time.monotonic()
        if now < pod.next_probe.get(kind, 0):
            return None
        pod.next_probe[kind] = now + probe["periodSeconds"]
        if self._passes(pod, probe):
            pod.failures[kind] = 0
            return True
        pod.failures[kind] = pod.failures.get(kind, 0) + 1
        return False if pod.failures[kind] >= probe["failureThreshold"] else None

    def _passes(self, pod: Pod, probe: dict[str, Any]) -> bool:
        ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
        url = f"http://{self._network.address(pod.node)}:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(url, timeout=probe["timeoutSeconds"], trust_env=False).status_code < 400
        return False

    def _end(self, pod: Pod) -> None:
        """PreStop's sleep, SIGTERM, and SIGKILL after the grace."""
        grace = pod.manifest["spec"]["terminationGracePeriodSeconds"]
        hook = pod.container.get("lifecycle", {}).get("preStop", {})
        announce = hook.get("sleep", {}).get("seconds", 0)
        assert pod.process is not None
        self._sleep(announce)
        self._kill(pod, signal.SIGTERM)
        try:
            pod.process.wait(grace - announce)
        except subprocess.TimeoutExpired:
            self._kill(pod, signal.SIGKILL)
        self.messages.append(f"{pod.name} was deleted and ended with {pod.process.wait()}")
        self._api.delete_now(pod.path)

    @staticmethod
    def _kill(pod: Pod, number: signal.Signals) -> None:
        if pod.process is not None and pod.process.poll() is None:
            pod.process.send_signal(number)

    def _say(self, pod: Pod) -> None:
        """Into the pod's status."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        address, ready = self._network.address(pod.node), "True" if pod.is_ready else "False"
        conditions = {"Initialized": "True", "ContainersReady": ready, "Ready": ready}
        container = {
            "name": pod.container["name"],
            "image": pod.container["image"],
            "imageID": "",
            "ready": pod.is_ready,
            "started": pod.is_started,
            "restartCount": pod.restarts,
            "state": {"running": {"startedAt": now}},
        }
        status: dict[str, object] = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": now,
            "conditions": [{"type": kind, "status": is_so} for kind, is_so in conditions.items()],
            "containerStatuses": [container],
        }
        self._api.patch_status(pod.path, status)
