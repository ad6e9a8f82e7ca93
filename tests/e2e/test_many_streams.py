"""Many streams at once: every one whole, and prefill and decode rows in the same steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI
from plait_testing.metrics import read_metrics
from plait_testing.recording import Record
from plait_testing.running_server import Server, StartServer, start_server


@dataclass(frozen=True, slots=True)
class Streamed:
    """What one stream's client saw."""

    text: str
    finish_reason: str | None
    num_tokens: int


KINDS = ("prefill", "decode", "mixed")


@pytest.fixture(scope="module")
def demo_server(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server of the demo model for both."""
    one = start_server(tmp_path_factory.mktemp("server") / "server.log", demo_gguf)
    assert one.url, one.errors
    yield one
    one.kill()


@pytest.mark.acceptance("spine")
def test_the_openai_sdk_streams_a_chat_answer(demo_server: Server) -> None:
    client = OpenAI(base_url=f"{demo_server.url}/v1", api_key="unused")
    chunks = list(
        client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": "Why is the sky blue? One sentence."}],
            max_tokens=48,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "blue" in text
    assert len(text.split()) > 3
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("stop", "length")
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.acceptance("spine")
def test_sixteen_streams_arrive_while_others_decode(demo_server: Server, record: Record) -> None:
    before = num_steps(read_metrics(demo_server.url))
    with an_endless_stream(demo_server.url):
        streamed = asyncio.run(staggered(demo_server.url, num_streams=16))
        metrics = read_metrics(demo_server.url)
    assert [each.num_tokens for each in streamed] == [output_len(index) for index in range(16)]
    assert all(each.finish_reason == "length" and each.text for each in streamed)
    steps = {kind: count - before[kind] for kind, count in num_steps(metrics).items()}
    for kind, count in steps.items():
        record("SmolLM2 16 staggered streams", f"steps_{kind}", "steps", count)
    assert steps["prefill"] == 1, "only the first stream finds nobody decoding"
    assert steps["mixed"] >= 16
    wait_until_idle(demo_server.url)


@contextmanager
def an_endless_stream(url: str) -> Iterator[None]:
    """It decodes before the block and until its end, when its client hangs up."""
    body = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        lines = response.iter_lines()  # to drop it would close the stream
        next(lines)
        yield


def wait_until_idle(url: str) -> None:
    """Until no request runs or has pages."""
    deadline = time.monotonic() + 60
    while any(read_metrics(url)[name] for name in ("plait_requests_running", 'plait_kv_pages{state="leased"}')):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def num_steps(metrics: dict[str, float]) -> dict[str, float]:
    return {kind: metrics[f'plait_steps_total{{kind="{kind}"}}'] for kind in KINDS}


def output_len(index: int) -> int:
    return 40 + 9 * (index % 5)


async def staggered(url: str, num_streams: int) -> list[Streamed]:
    """Each stream begins when the one before it has its first text and decodes."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        model = (await client.models.list()).data[0].id
        under_way = []
        for index in range(num_streams):
            has_begun = asyncio.Event()
            under_way.append(asyncio.create_task(stream(client, model, index, has_begun)))
            await has_begun.wait()
        return await asyncio.gather(*under_way)


async def stream(client: AsyncOpenAI, model: str, index: int, has_begun: asyncio.Event) -> Streamed:
    content = "Tell me about the number " + " and ".join(str(n) for n in range(index + 1)) + "."
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],
        max_tokens=output_len(index),
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, finish_reason, num_tokens = "", None, 0
    async for chunk in answer:
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if text:
                has_begun.set()
            finish_reason = choice.finish_reason or finish_reason
    return Streamed(text, finish_reason, num_tokens)


def test_prompt_tokens_are_computed_once_at_every_chunk_size(check_models: Path, server: StartServer) -> None:
    """No chunk begins again at position 0: the steps' prefill tokens are the prompts' tokens."""
    prompt = [100 + position % 150 for position in range(500)]
    for chunk in ("7", "64", "2048"):
        flags = ("--long-prefill-token-threshold", chunk, "--max-batch-tokens", "2048")
        running = server(check_models / "recall-gqa", *flags)
        model = httpx.get(f"{running.url}/v1/models", timeout=60).json()["data"][0]["id"]
        before = read_metrics(running.url)['plait_step_tokens_total{phase="prefill"}']
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
        httpx.post(f"{running.url}/v1/completions", json=body, timeout=120).raise_for_status()
        assert read_metrics(running.url)['plait_step_tokens_total{phase="prefill"}'] - before == 500
