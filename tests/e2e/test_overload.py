"""A server that is offered more than it can carry answers every request, and is healthy afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from plait_testing.running_server import StartServer

MODEL = "recall-gqa"
MAX_QUEUE, NUM_REQUESTS = 4, 60
OUTPUT_LEN = 24


async def offer(url: str) -> list[httpx.Response]:
    """All requests at once."""

    async def ask(number: int) -> httpx.Response:
        body = {"model": MODEL, "prompt": [20 + number % 50] * 64, "max_tokens": OUTPUT_LEN, "ignore_eos": True}
        return await client.post("/v1/completions", json=body)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        return await asyncio.gather(*(ask(number) for number in range(NUM_REQUESTS)))


def check(answers: list[httpx.Response]) -> tuple[int, int]:
    """How many were answered and how many rejected; every other answer is a failure."""
    whole = [it for it in answers if it.status_code == 200]
    rejected = [it for it in answers if it.status_code == 429]
    assert len(whole) + len(rejected) == NUM_REQUESTS, [it.status_code for it in answers]
    assert all(it.json()["usage"]["completion_tokens"] == OUTPUT_LEN for it in whole)
    assert all(int(it.headers["retry-after"]) >= 1 for it in rejected)
    return len(whole), len(rejected)


def test_under_overload_every_request_is_answered_or_told_when_to_come_back(
    server: StartServer, check_models: Path
) -> None:
    flags = ("--max-seqs", "2", "--max-queue", str(MAX_QUEUE), "--threads", "1")
    running = server(check_models / MODEL, *flags)
    num_whole, num_rejected = check(asyncio.run(offer(running.url)))
    assert num_whole >= MAX_QUEUE
    assert num_rejected > 0
    assert httpx.get(f"{running.url}/health").status_code == 200
    num_whole, _ = check(asyncio.run(offer(running.url)))
    assert num_whole >= MAX_QUEUE
