"""Plays kube-proxy and DNS: the clients' namespace reaches Services by their addresses, pods know each other's names.

A connection to a Service's address goes to one of its ready pods at random and stays there: NAT, as kube-proxy does it.
Names of pods behind headless Services stand in each namespace's own `/etc/hosts`.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import httpx

from plait_testing.control_plane import ControlPlane
from plait_testing.kube_api import Api
from plait_testing.node_network import NodeNetwork, ip

CLIENTS = 0
"""The namespace that has the Services' addresses."""
SERVICES = "10.96.0.0/16"
_ROUND_SECONDS = 0.1
Json = dict[str, Any]


class ServiceNetwork(threading.Thread):
    """Of one namespace of the cluster."""

    def __init__(self, plane: ControlPlane, network: NodeNetwork, namespace: str) -> None:
        super().__init__(daemon=True)
        self._api, self._network, self._namespace = Api(plane), network, namespace
        self._asked_to_end = threading.Event()
        self._rules, self._hosts = "", ""
        self.ready: dict[str, list[str]] = {}
        """Addresses of each Service's ready pods, as the rules have them."""
        self.errors: list[str] = []

    def __enter__(self) -> ServiceNetwork:
        self._network.write_hosts("")
        ip("-n", self._network.namespace(CLIENTS), "route", "add", SERVICES, "dev", "eth0")
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._asked_to_end.set()
        self.join()

    def url(self, service: str) -> str:
        """By the Service's own address."""
        spec = self._api.get(f"/api/v1/namespaces/{self._namespace}/services/{service}")["spec"]
        return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"

    def run(self) -> None:
        while not self._asked_to_end.wait(_ROUND_SECONDS):
            try:
                self._look_round()
            except httpx.HTTPError as error:  # a busy machine's API server may be late
                self.errors.append(f"the API server: {error!r}")

    def _look_round(self) -> None:
        where = f"namespaces/{self._namespace}"
        found = self._api.get(f"/api/v1/{where}/services")["items"]
        services = [one for one in found if "clusterIP" in one["spec"]]  # the others are names of somewhere else
        slices = self._api.get(f"/apis/discovery.k8s.io/v1/{where}/endpointslices")["items"]
        self._set_rules(services, slices)
        hosts = "".join(sorted(self._host_lines(services, slices)))
        if hosts != self._hosts:
            self._hosts = hosts
            self._network.write_hosts(hosts)

    def _set_rules(self, services: list[Json], slices: list[Json]) -> None:
        found = {
            one["metadata"]["name"]: [
                address
                for piece in slices_of(one, slices)
                for endpoint in piece.get("endpoints") or []
                if endpoint["conditions"].get("ready")
                for address in endpoint["addresses"]
            ]
            for one in services
        }
        parts = [rules(one, found[one["metadata"]["name"]]) for one in services if one["spec"]["clusterIP"] != "None"]
        text = "\n".join(["*nat", ":OUTPUT ACCEPT", *(nat for nat, _ in parts), "COMMIT", "*filter", ":OUTPUT ACCEPT"])
        text += "\n".join(["", *(refused for _, refused in parts), "COMMIT", ""])
        if text != self._rules:
            command = ["ip", "netns", "exec", self._network.namespace(CLIENTS), "iptables-restore"]
            subprocess.run(command, input=text, text=True, check=True)
            self._rules = text
        self.ready = found

    def _host_lines(self, services: list[Json], slices: list[Json]) -> Iterator[str]:
        for one in services:
            if one["spec"]["clusterIP"] != "None":
                continue
            domain = f"{one['metadata']['name']}.{self._namespace}"
            for piece in slices_of(one, slices):
                for endpoint in piece.get("endpoints") or []:
                    name = f"{endpoint.get('hostname')}.{domain}"
                    yield f"{endpoint['addresses'][0]} {name} {name}.svc.cluster.local\n"


def slices_of(service: Json, slices: list[Json]) -> list[Json]:
    name = service["metadata"]["name"]
    return [one for one in slices if one["metadata"]["labels"].get("kubernetes.io/service-name") == name]


def rules(service: Json, ready: list[str]) -> tuple[str, str]:
    """Of the tables nat and filter: each ready pod gets as many connections, and without any they are refused."""
    port = service["spec"]["ports"][0]
    match = f"-A OUTPUT -d {service['spec']['clusterIP']}/32 -p tcp --dport {port['port']}"
    target = service["spec"]["ports"][0].get("targetPort", port["port"])
    number = target if isinstance(target, int) else port["port"]
    nat = [
        f"{match} -m statistic --mode random --probability {1 / left:.6f} -j DNAT --to-destination {address}:{number}"
        for left, address in zip(range(len(ready), 0, -1), ready, strict=True)
    ]
    return "\n".join(nat), "" if ready else f"{match} -j REJECT --reject-with tcp-reset"
