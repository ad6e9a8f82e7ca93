"""Clients that ask a Service all the while: what was answered, and what failed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx

from plait_testing.mini_kubelet import enter_network
from plait_testing.node_network import NodeNetwork
from plait_testing.service_network import CLIENTS

KEY = "sk-test-of-the-chart-0123456789abcdef"
_AGAIN_SECONDS = 0.2


@dataclass
class Load:
    """One after the other, a connection for each request."""

    url: str
    has_pods: Callable[[], bool]
    """Whether any pod is behind the Service: on an overloaded machine all may be unready for a moment."""
    num_tokens: int = 64
    answered: int = 0
    num_refused: int = 0
    """Without a pod behind the Service; such a client asks again."""
    failed: list[str] = field(default_factory=list)
    asked_to_end: threading.Event = field(default_factory=threading.Event)

    def run(self, network: NodeNetwork) -> None:
        enter_network(network, CLIENTS)
        while not self.asked_to_end.is_set():
            self._ask()

    def _ask(self) -> None:
        body = {"prompt": "0123 4567", "max_tokens": self.num_tokens, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {KEY}"}
        try:
            done = httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
        except httpx.ConnectError as error:
            if self.has_pods():
                self.failed.append(repr(error))
            else:
                self.num_refused += 1
                time.sleep(_AGAIN_SECONDS)
            return
        except httpx.TransportError as error:
            self.failed.append(repr(error))
            return
        if done.status_code == httpx.codes.OK:
            self.answered += 1
        else:
            self.failed.append(f"{done.status_code} {done.text}")


@contextlib.contextmanager
def load(
    network: NodeNetwork, url: str, has_pods: Callable[[], bool], *, clients: int = 2, num_tokens: int = 64
) -> Iterator[Load]:
    """So many clients until the block ends; their counts are final after it."""
    both = Load(url, has_pods, num_tokens)
    threads = [threading.Thread(target=both.run, args=(network,)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield both
    finally:
        both.asked_to_end.set()
        for thread in threads:
            thread.join()
