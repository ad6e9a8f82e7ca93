"""What the front door counts itself, over a real socket."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from plait.http.auth import ApiKeys
from plait.http.front_metrics import MAX_KEYS, FrontMetrics
from plait.http.key_terms import KeyTerms
from plait.http.streams import Used
from plait_testing.front_door import CHAT, Asking, Door, open_door
from plait_testing.in_memory_engine import record

LAST, USED = 1, 16
KEY = {"authorization": "Bearer sk-first"}


@dataclass
class Counted:
    door: Door
    front: FrontMetrics

    def lines(self, *, with_keys: bool = True) -> list[str]:
        return self.front.text(with_keys=with_keys).decode().splitlines()

    def lines_with(self, line: str) -> list[str]:
        """An answer is counted once it is sent: its client may have it before."""
        deadline = time.monotonic() + 20
        while line not in (lines := self.lines()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return lines


@pytest.fixture
def counted() -> Iterator[Counted]:
    front = FrontMetrics()
    keys = ApiKeys({"sk-first": KeyTerms(name="app")})
    for door in open_door(keys, front=front):
        yield Counted(door, front)


def test_answers_are_counted_by_path_and_status_and_use_by_key(counted: Counted) -> None:
    door = counted.door
    for path in ("/v1/models", "/v1/models/tiny", "/v1/models/other", "/made/up", "/made/up/too"):
        httpx.get(door.url + path, headers=KEY, timeout=60)
    httpx.get(door.url + "/v1/models", timeout=60)
    asking = Asking(door, client=httpx.Client(timeout=60, headers=KEY))
    stream = door.wait_for(1)
    door.engine.send(record(stream, b"{}", LAST), record(stream, struct.pack("<QQB", 70, 5, 1), USED))
    asking.answer()
    lines = counted.lines_with(f'plait_http_answers_total{{path="{CHAT}",status="200"}} 1')
    for path, status, num in (
        ("/v1/models", 200, 1),
        ("/v1/models", 401, 1),
        ("/v1/models/{model}", 200, 1),
        ("/v1/models/{model}", 404, 1),
        ("other", 404, 2),
        (CHAT, 200, 1),
    ):
        assert f'plait_http_answers_total{{path="{path}",status="{status}"}} {num}' in lines
    assert 'plait_key_requests_total{key="app"} 1' in lines
    assert 'plait_key_tokens_total{key="app",of="prompt"} 70' in lines
    assert 'plait_key_tokens_total{key="app",of="output"} 5' in lines
    assert not any("app" in line for line in counted.lines(with_keys=False)), "for operators alone"


def test_lag_lies_in_the_first_bucket_that_ends_at_or_after_it() -> None:
    front = FrontMetrics()
    for seconds in (0.0, 0.001, 0.003, 100.0):
        front.count_lag(seconds)
    lines = front.text(with_keys=False).decode().splitlines()
    name = "plait_event_loop_lag_seconds"
    for end, num in (("0.001", 2), ("0.002", 2), ("0.004", 3), ("8.192", 3), ("+Inf", 4)):
        assert f'{name}_bucket{{le="{end}"}} {num}' in lines
    assert f"{name}_sum 100.004000" in lines


def test_keys_that_come_and_go_do_not_fill_the_page() -> None:
    front = FrontMetrics()
    for number in range(MAX_KEYS + 2):
        front.count_use(f"key-{number}", Used(1, 1, "stop"))
    lines = front.text(with_keys=True).decode().splitlines()
    assert sum(line.startswith("plait_key_requests_total") for line in lines) == MAX_KEYS + 1
    assert 'plait_key_requests_total{key="other"} 2' in lines
