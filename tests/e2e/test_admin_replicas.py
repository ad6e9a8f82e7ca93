"""The admin listener of a server with two replicas: it pauses both, and ends requests of either."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from plait_testing.running_server import StartServer

ADMIN_LINE = "Admin listener: "
TIMEOUT = 120


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_replicas_are_paused_resumed_and_lose_a_request_each(check_models: Path, server: StartServer) -> None:
    running = server(check_models / "recall-gqa", "--threads=1", "--dp=2", "--admin-port=0")
    admin = httpx.Client(base_url=running.read_line(ADMIN_LINE).removeprefix(ADMIN_LINE), timeout=TIMEOUT)

    def ask(number: int) -> httpx.Response:
        body = {"prompt": f"count {number} 9", "max_tokens": 4, "ignore_eos": True}
        headers = {"x-request-id": f"r-{number}"}
        return httpx.post(running.url + "/v1/completions", json=body, headers=headers, timeout=TIMEOUT)

    def waiting() -> dict[str, Any]:
        calls = admin.get("/admin/requests").json()["requests"]
        return {call["id"]: call for call in calls if call["state"] == "waiting" and "replica" in call}

    with admin, ThreadPoolExecutor(4) as pool:
        assert admin.post("/admin/pause").json() == {"paused": True}
        answers = {f"r-{number}": pool.submit(ask, number) for number in range(4)}
        wait_until(lambda: len(waiting()) == 4)
        by_replica = {call["replica"]: call["id"] for call in waiting().values()}
        assert by_replica.keys() == {0, 1}, "both hold requests"
        for ended in by_replica.values():
            assert admin.delete(f"/admin/requests/{ended}").json() == {"ended": 1}
            assert answers.pop(ended).result().status_code == 410
        assert not any(answer.done() for answer in answers.values())
        assert admin.post("/admin/resume").json() == {"paused": False}
        assert [answer.result().status_code for answer in answers.values()] == [200, 200]
