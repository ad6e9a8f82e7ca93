"""A server whose clients have keys and share it: who is let in, who goes first, and who hears 429, and until when."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from plait_testing.running_server import Server, start_server
from plait_testing.slow_steps import SlowSteps

MODEL = "recall-gqa"
MAX_QUEUE, NUM_REQUESTS = 12, 60
PROMPT_LEN, OUTPUT_LEN = 64, 24
LENGTHS = range(PROMPT_LEN - MAX_QUEUE, PROMPT_LEN)
"""Prompts of waiting requests: too short for a cached page, and each known by its length in the step trace."""
KEYS = "heavy weight=3\nplain\nlate priority=2\nother\n"
LOOKED_AT = ("loaded", "refused")
PING_METHODS = ("GET", "HEAD", "POST")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TIMEOUT = 120.0


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path


@dataclass(frozen=True)
class Shared:
    """A server that runs one request at a time."""

    server: Server
    steps: SlowSteps
    trace: Path
    """Its step trace."""

    @property
    def url(self) -> str:
        return self.server.url

    def prefills(self) -> list[int]:
        """Prompt tokens of each step that had some, in order; a line without its end is still being written."""
        whole_lines, _, _ = self.trace.read_text().rpartition("\n")
        steps = map(json.loads, whole_lines.splitlines())
        return [step["prefill_tokens"] for step in steps if step["prefill_tokens"]]


@pytest.fixture(scope="module")
def shared(key_file: Path, check_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("shared")
    steps, trace = SlowSteps(folder), folder / "steps.jsonl"
    flags = ("--policy", "fair", "--max-seqs", "1", "--max-queue", str(MAX_QUEUE), "--threads", "1")
    keys = ("--host", "0.0.0.0", "--api-key-file", str(key_file), "--enable-prompt-tokens-details")
    with steps.of_servers():
        one = start_server(folder / "log", check_models / MODEL, *flags, *keys, "--step-trace", str(trace))
    assert one.url, one.errors
    yield Shared(one, steps, trace)
    one.kill()


def body(number: int, prompt_len: int = PROMPT_LEN, **fields: object) -> dict[str, object]:
    """A request that shares no page with those of other numbers."""
    prompt = [number % 200, *[20 + number % 50] * (prompt_len - 1)]
    return {"prompt": prompt, "max_tokens": OUTPUT_LEN, "ignore_eos": True, **fields}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@dataclass
class Backlog:
    """Requests that wait while another one runs, and the order in which they ran."""

    shared: Shared
    pool: ThreadPoolExecutor
    num_prefills: int
    """Those before its first request."""
    names: dict[int, str] = field(default_factory=dict)
    """The name of each request, by the length of its prompt."""

    def ask(self, *asked: tuple[str, str, Mapping[str, object]]) -> list[Future[httpx.Response]]:
        """Send requests, each a name, a key and fields, and return once they wait, or fill the queue."""
        url = self.shared.url
        num = min(num_waiting(url) + len(asked), MAX_QUEUE)
        self.names = {length: name for length, (name, _, _) in zip(LENGTHS, asked, strict=False)}
        futures = [
            self.pool.submit(post, url, body(number, length, **fields), key)
            for number, (length, (_, key, fields)) in enumerate(zip(LENGTHS, asked, strict=False))
        ]
        wait_for_queue(url, num)
        return futures

    def served(self) -> list[str]:
        """Names of the requests, all of which ran, in the order in which they did."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            ran = [length for length in self.shared.prefills()[self.num_prefills :] if length in self.names]
            if len(ran) == len(self.names):
                return [self.names[length] for length in ran]
            assert time.monotonic() < deadline, ran
            time.sleep(0.02)


def post(url: str, sent: dict[str, Any], key: str, route: str = COMPLETIONS) -> httpx.Response:
    return httpx.post(url + route, json=sent, headers=bearer(key), timeout=TIMEOUT)


def metric(url: str, name: str) -> int:
    text = httpx.get(f"{url}/metrics", headers=bearer("plain"), timeout=TIMEOUT).text
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def num_waiting(url: str) -> int:
    return metric(url, "plait_requests_waiting")


def rejections(url: str) -> int:
    return metric(url, 'plait_requests_rejected_total{reason="queue_full"}')


def wait_for_queue(url: str, num: int) -> None:
    """Wait until so many requests wait; raises `TimeoutError`."""
    deadline = time.monotonic() + TIMEOUT
    while num_waiting(url) != num:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{num_waiting(url)} requests wait, not {num}")
        time.sleep(0.005)


@contextmanager
def held(shared: Shared, is_slow: bool = True) -> Iterator[Backlog]:
    """Requests that are sent within wait; they run when it ends, and have been answered after it."""
    running: Any = body(199, max_tokens=8000, stream=True)
    with ThreadPoolExecutor(2 * MAX_QUEUE) as pool:
        backlog = Backlog(shared, pool, len(shared.prefills()))
        with (
            shared.steps.within() if is_slow else nullcontext(),
            httpx.stream(
                "POST", shared.url + COMPLETIONS, json=running, headers=bearer("other"), timeout=TIMEOUT
            ) as response,
        ):
            lines = response.iter_lines()  # to drop it would close the stream
            next(lines)
            yield backlog


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    return error


def test_keys_from_a_file_lock_the_server(shared: Shared, key_file: Path) -> None:
    assert httpx.get(shared.url + "/v1/models", timeout=60).status_code == 401
    assert all(httpx.request(method, shared.url + "/ping", timeout=60).status_code == 200 for method in PING_METHODS)
    assert httpx.get(shared.url + "/health", timeout=60).status_code == 200
    client = openai.OpenAI(base_url=shared.url + "/v1", api_key="other", max_retries=0)
    hello: Any = [{"role": "user", "content": "copy kilo"}]
    answer = client.chat.completions.create(model=MODEL, messages=hello, temperature=0)
    assert answer.choices[0].message.content == "kilo"
    header = shared.server.read_line("curl").split(" -H ")[-1]
    assert subprocess.check_output(["bash", "-c", f"printf %s {header}"]) == b"Authorization: Bearer heavy"
    words = [sys.executable, "-m", "plait.cli", "chat", "--url", shared.url, "--api-key-file", str(key_file)]
    typed = subprocess.run(words, input="copy kilo\n", capture_output=True, text=True, timeout=120, check=True)
    assert typed.stdout.count("kilo") == 1


@contextmanager
def rewritten(shared: Shared, key_file: Path) -> Iterator[Callable[[str], None]]:
    """Writes the server's key file anew; the first keys count again after it."""

    def write(content: str) -> None:
        """Returns once the server has looked at it."""
        num_changes = changes()
        key_file.write_text(content)
        deadline = time.monotonic() + TIMEOUT
        while changes() == num_changes:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def changes() -> int:
        return sum(metric(shared.url, f'plait_api_key_file_changes_total{{result="{it}"}}') for it in LOOKED_AT)

    try:
        yield write
    finally:
        write(KEYS)


def may_enter(url: str, key: str) -> bool:
    return httpx.get(url + "/v1/models", headers=bearer(key), timeout=TIMEOUT).status_code == 200


def test_keys_change_without_a_restart_while_a_stream_goes_on(shared: Shared, key_file: Path) -> None:
    running: Any = body(198, max_tokens=8000, stream=True)
    with (
        shared.steps.within(),
        httpx.stream(
            "POST", shared.url + COMPLETIONS, json=running, headers=bearer("other"), timeout=TIMEOUT
        ) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        with rewritten(shared, key_file) as write:
            write("plain\n# other left\nfresh\n")
            assert may_enter(shared.url, "fresh")
            assert not may_enter(shared.url, "other")
            assert [line for line in (next(lines) for _ in range(6)) if line.startswith("data: {")]
            write("# nobody\n")
            assert metric(shared.url, "plait_api_key_file_refused") == 1
            assert may_enter(shared.url, "fresh")
            assert "API keys: kept the 2 that were read before" in shared.server.errors
            assert next(lines) is not None
    assert may_enter(shared.url, "other")


def statuses(asked: list[Future[httpx.Response]]) -> list[int]:
    return [each.result().status_code for each in asked]


def test_a_full_queue_is_a_429_that_says_when_to_come_back(shared: Shared) -> None:
    with held(shared) as backlog:
        asked = backlog.ask(*[("in time", "plain", {})] * MAX_QUEUE)
        refused = post(shared.url, body(0), "plain")
    assert statuses(asked) == [200] * MAX_QUEUE
    assert refused.status_code == 429
    assert "queue is full" in error_of(refused)["message"]
    assert int(refused.headers["retry-after"]) >= 1


@pytest.mark.slow
def test_when_to_come_back_is_true_on_a_machine_that_does_nothing_else(shared: Shared) -> None:
    """The core's tests of its queue say the same without a clock."""
    with held(shared, is_slow=False) as backlog:
        asked = backlog.ask(*[("in time", "plain", {"max_tokens": 150})] * MAX_QUEUE)
        refused = post(shared.url, body(0), "plain")
        begin = time.monotonic()
    elapsed = time.monotonic() - begin
    assert statuses(asked) == [200] * MAX_QUEUE
    hint = int(refused.headers["retry-after"])
    assert elapsed / 2 <= hint <= 2 * elapsed + 1, "true within a factor of two, in whole seconds"


def test_one_tenant_cannot_fill_the_queue_for_others(shared: Shared) -> None:
    with held(shared) as backlog:
        flood = backlog.ask(*[("flood", "plain", {})] * MAX_QUEUE)
        others = [backlog.pool.submit(post, shared.url, body(number), "other") for number in range(3)]
        while sum(each.done() for each in flood) < len(others):
            time.sleep(0.005)
    assert statuses(others) == [200] * 3
    assert sorted(statuses(flood)) == [200] * (MAX_QUEUE - 3) + [429] * 3
    hints = [each.result().headers.get("retry-after") for each in flood if each.result().status_code == 429]
    assert all(int(hint) >= 1 for hint in hints)


def test_a_key_of_weight_three_is_served_three_times_as_often(shared: Shared) -> None:
    with held(shared) as backlog:
        backlog.ask(*[("plain", "plain", {}), ("heavy", "heavy", {})] * (MAX_QUEUE // 2))
    served = backlog.served()
    before_the_last_heavy = served[: MAX_QUEUE - served[::-1].index("heavy")]
    assert before_the_last_heavy.count("plain") in (1, 2, 3), served


def test_a_tenants_urgent_requests_go_first_as_far_as_its_key_allows(shared: Shared) -> None:
    with held(shared) as backlog:
        backlog.ask(*[(str(priority), "late", {"priority": priority}) for priority in (5, 0, 7, 3)])
        refused = post(shared.url, body(0, priority=1), "late")
    assert backlog.served() == ["0", "3", "5", "7"], "none, which counts as the least that its key allows"
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "priority"
    assert "may ask for 2 or more" in error_of(refused)["message"]


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_the_usage_says_how_much_was_cached_for_the_same_key(shared: Shared, route: str) -> None:
    words = f"{route} " * 10
    sent: dict[str, Any] = {"messages": [{"role": "user", "content": words}]}
    if route == COMPLETIONS:
        sent = {"prompt": words}

    def cached_pages(key: str) -> int:
        answer = post(shared.url, sent | {"max_tokens": 1}, key, route)
        num_tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return num_tokens // 64

    num_pages = len(words) // 64
    assert [cached_pages(key) for key in ("plain", "plain", "other", "other")] == [0, num_pages, 0, num_pages]


async def offer(url: str) -> list[httpx.Response]:
    """All requests at once."""

    async def ask(number: int) -> httpx.Response:
        return await client.post(COMPLETIONS, json=body(number), headers=bearer("plain"))

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits) as client:
        return await asyncio.gather(*(ask(number) for number in range(NUM_REQUESTS)))


def test_under_overload_every_request_is_answered_or_told_when_to_come_back(shared: Shared) -> None:
    for _ in range(2):
        num_rejected = rejections(shared.url)
        with ThreadPoolExecutor(1) as pool:
            with shared.steps.within():
                offered = pool.submit(asyncio.run, offer(shared.url))
                while rejections(shared.url) == num_rejected:
                    assert not offered.done()
            answers = offered.result()
        whole = [it for it in answers if it.status_code == 200]
        rejected = [it for it in answers if it.status_code == 429]
        assert len(whole) + len(rejected) == NUM_REQUESTS, [it.status_code for it in answers]
        assert all(it.json()["usage"]["completion_tokens"] == OUTPUT_LEN for it in whole)
        assert all(int(it.headers["retry-after"]) >= 1 for it in rejected)
        assert len(whole) >= MAX_QUEUE
        assert rejected
        assert httpx.get(f"{shared.url}/health", timeout=60).status_code == 200
