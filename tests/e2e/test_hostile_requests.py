"""Requests that are sent to break the server: each is refused, its memory stays, and the others' answers are right."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest
from plait_testing.hostile import ATTACKS, Answered, attack_with_all, wrongly_answered
from plait_testing.running_server import Server

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "copy kilo"}], "max_tokens": 16, "temperature": 0}
MAX_GROWTH = 24 << 20
"""Bytes that the server may keep: what eight requests of each kind send, kept, would be over 100 MiB."""


SETTLE_SECONDS = 30.0
"""What the last bodies took goes back to the system a while after them, and with the next requests."""


async def answer(url: str) -> str:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        told = await client.post("/v1/chat/completions", json=CHAT)
        assert told.status_code == 200, told.text
        content: str = told.json()["choices"][0]["message"]["content"]
        return content


async def beside(url: str, number: int) -> tuple[list[Answered], list[str]]:
    """What hostile requests got, and what a client got meanwhile."""
    answers: list[str] = []
    attacking = asyncio.create_task(attack_with_all(httpx.URL(url).port or 80, number, 4 * len(ATTACKS)))
    while not attacking.done():
        answers.append(await answer(url))
    return await attacking, answers


def settles(holds: Callable[[], bool]) -> bool:
    """Whether it holds before long."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.2)
    return holds()


@pytest.mark.timeout(1800)
def test_hostile_requests_are_refused_and_leave_nothing_behind(
    recall_server: Server, sized: Callable[[int, int], int]
) -> None:
    url, process = recall_server.url, psutil.Process(recall_server.process.pid)
    right = asyncio.run(answer(url))
    asyncio.run(beside(url, 4 * len(ATTACKS)))
    before = process.memory_info().rss
    attacked, answers = asyncio.run(beside(url, sized(8 * len(ATTACKS), 10_000)))
    assert list(wrongly_answered(attacked)) == []
    assert {each.kind for each in attacked} == {one.kind for one in ATTACKS}
    assert set(answers) == {right}
    assert settles(lambda: process.memory_info().rss < before + MAX_GROWTH)
    assert httpx.get(f"{url}/ready", timeout=60).status_code == 200
    assert recall_server.process.poll() is None
