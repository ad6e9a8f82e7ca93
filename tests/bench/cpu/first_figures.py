"""What a user of one small machine gets: tokens a second and waiting times at 1 and 8 streams.

    python tests/bench/cpu/first_figures.py --url http://127.0.0.1:8000 --out tests/bench/results/first-figures.json

Closed loop, streamed completions of random token ids (fresh ones each run), greedy, end tokens ignored.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx

LOADS = ((1, 128, 64), (8, 128, 64), (8, 512, 64))
REQUESTS_PER_STREAM = 4
WARM_UP_REQUESTS = 2


@dataclass(frozen=True, slots=True)
class Timed:
    """One request: seconds from sending it to its first token, and between its tokens."""

    ttft: float
    itl: tuple[float, ...]


async def timed_request(client: httpx.AsyncClient, model: str, prompt: list[int], output_len: int) -> Timed:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    sent = time.perf_counter()
    arrivals: list[float] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.perf_counter())
    return Timed(arrivals[0] - sent, tuple(late - early for early, late in pairwise(arrivals)))


async def closed_loop(
    client: httpx.AsyncClient, model: str, num_streams: int, input_len: int, output_len: int
) -> dict[str, float]:
    """One load's figures in seconds and tokens a second."""

    async def one_stream() -> list[Timed]:
        prompts = [[random.randrange(1000, 40000) for _ in range(input_len)] for _ in range(REQUESTS_PER_STREAM)]
        return [await timed_request(client, model, prompt, output_len) for prompt in prompts]

    started = time.perf_counter()
    streams = await asyncio.gather(*(one_stream() for _ in range(num_streams)))
    duration = time.perf_counter() - started
    timed = [each for stream in streams for each in stream]
    ttft, itl = [each.ttft for each in timed], [gap for each in timed for gap in each.itl]
    return {
        "output_tokens_per_second": len(timed) * output_len / duration,
        "ttft_p50": statistics.median(ttft),
        "ttft_max": max(ttft),
        "itl_p50": statistics.median(itl),
        "itl_max": max(itl),
    }


async def measure(url: str) -> list[dict[str, object]]:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        for _ in range(WARM_UP_REQUESTS):
            await timed_request(client, model, [1000] * 32, 8)
        rows: list[dict[str, object]] = []
        for num_streams, input_len, output_len in LOADS:
            case = f"{input_len}/{output_len}@{num_streams}"
            figures = await closed_loop(client, model, num_streams, input_len, output_len)
            for metric, value in figures.items():
                unit = "tokens/s" if metric == "output_tokens_per_second" else "seconds"
                rows.append({"case": case, "metric": metric, "unit": unit, "value": round(value, 5), "goal": None})
            print(case, {metric: round(value, 4) for metric, value in figures.items()}, flush=True)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(measure(options.url))
    if options.out:
        options.out.write_text(
            json.dumps({"command": "tests/bench/cpu/first_figures.py", "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
