"""What clients see of a running server: OpenAI's SDK, raw HTTP, and the terminal chat."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from models import recall_tasks
from plait_testing.running_server import Server, StartServer
from plait_testing.slow_steps import SlowSteps

HELLO: Any = [{"role": "user", "content": "copy kilo"}]
CHAT = "/v1/chat/completions"


@pytest.fixture
def client(recall_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=recall_server.url + "/v1", api_key="none", max_retries=0, timeout=120)


def metric(server: Server, name: str) -> float:
    """The value of one sample of `/metrics`."""
    text = httpx.get(server.url + "/metrics", timeout=60).text
    match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert match is not None, text
    return float(match[1])


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    return error


def test_the_openai_sdk_streams_a_chat_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="recall-gqa",
        messages=HELLO,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "kilo"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_whole_answer_says_the_same_as_a_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="recall-gqa", messages=HELLO, temperature=0)
    assert whole.choices[0].message.content == "kilo"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_sixteen_streams_at_a_time_are_all_right_and_share_steps(
    client: openai.OpenAI, recall_server: Server, recall_steps: SlowSteps
) -> None:
    """The first steps are slow: prompts come while others decode."""
    asked = recall_tasks.problems(seed=5, num=32, budget=600)

    def answer(problem: Any) -> str:
        stream = client.chat.completions.create(
            model="recall-gqa", messages=problem["messages"], temperature=0, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    mixed = 'plait_steps_total{kind="mixed"}'
    num_mixed = metric(recall_server, mixed)
    with ThreadPoolExecutor(16) as pool:
        with recall_steps.within():
            answers = pool.map(answer, asked)
            wait_until(recall_server, mixed, lambda num: num > num_mixed)
        assert list(answers) == [problem["answer"] for problem in asked]


def test_the_sdk_lists_and_retrieves_the_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["recall-gqa"]
    assert client.models.retrieve("recall-gqa").id == "recall-gqa"
    with pytest.raises(openai.NotFoundError, match="recall-gqa"):
        client.models.retrieve("other")


def test_completions_take_token_ids_and_several_prompts(client: openai.OpenAI) -> None:
    prompt: Any = [[256, 260, *b"copy kilo", 261], [256, 260, *b"copy tuba", 261]]
    answer = client.completions.create(model="recall-gqa", prompt=prompt, temperature=0, max_tokens=10)
    assert [choice.text for choice in answer.choices] == ["kilo", "tuba"]
    assert [choice.index for choice in answer.choices] == [0, 1]


def test_log_probabilities_come_as_the_sdk_reads_them(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="recall-gqa",
        messages=HELLO,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content[:4]) == "kilo"
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)
    assert all(token.logprob <= 0 for token in logprobs.content)


def test_stop_strings_and_max_tokens_end_an_answer(client: openai.OpenAI) -> None:
    stopped = client.chat.completions.create(model="recall-gqa", messages=HELLO, temperature=0, stop="lo")
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("ki", "stop")
    cut = client.chat.completions.create(model="recall-gqa", messages=HELLO, temperature=0, max_tokens=2)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("ki", "length")


def test_a_seeded_request_repeats_itself(recall_server: Server) -> None:
    def sample(seed: int) -> list[int]:
        body = {"prompt": "x", "temperature": 2, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(recall_server.url + "/v1/completions", json=body | {"seed": seed}, timeout=60).json()
        token_ids: list[int] = answer["choices"][0]["token_ids"]
        return token_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_a_prompt_longer_than_the_context_is_a_400_that_says_so(recall_server: Server) -> None:
    long = [{"role": "user", "content": "a" * 9000}]
    refused = httpx.post(recall_server.url + CHAT, json={"messages": long}, timeout=60)
    assert refused.status_code == 400
    assert "8192" in error_of(refused)["message"]
    fits_not = {"messages": HELLO, "max_tokens": 8192}
    refused = httpx.post(recall_server.url + CHAT, json=fits_not, timeout=60)
    assert refused.status_code == 400
    assert "max_tokens" in error_of(refused)["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"messages": [', "not valid JSON"),
        (b"[]", "JSON object"),
        (b"{}", "messages"),
        (b'{"messages": "hi"}', "`messages`"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "`messages[0].content`"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', "`temperature`"),
        (b'{"messages": [{"role": "user", "content": "x"}], "best_of": 2}', "`best_of`"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop_token_ids": [999999]}', "stop_token_ids"),
    ],
)
def test_bad_bodies_are_400s_that_name_the_fault(recall_server: Server, body: bytes, words: str) -> None:
    refused = httpx.post(
        recall_server.url + CHAT, content=body, headers={"content-type": "application/json"}, timeout=60
    )
    assert refused.status_code == 400
    assert words in error_of(refused)["message"]


COMPLETIONS = "/v1/completions"
LIMITS: list[tuple[str, str, Any, Any]] = [
    (CHAT, "temperature", 100, 100.1),
    (CHAT, "presence_penalty", -2, -2.1),
    (CHAT, "frequency_penalty", 2, 2.1),
    (CHAT, "repetition_penalty", 0.01, 0),
    (CHAT, "repetition_penalty", 100, 101),
    (CHAT, "min_tokens", 1, 2),
    (CHAT, "min_tokens", 0, -1),
    (CHAT, "logit_bias", {str(id): 1 for id in range(264)}, {"264": 1}),
    (CHAT, "logit_bias", {"1": 100, "2": -100}, {"1": 100.5}),
    (CHAT, "logit_bias", {"1": 1}, {"one": 1}),
    (CHAT, "logit_bias", {f"{id:05}": 1 for id in range(264)}, {f"{0:0{width}}": 1 for width in range(1, 1026)}),
    (CHAT, "allowed_token_ids", [0, 263] * 2048, [0] * 4097),
    (CHAT, "allowed_token_ids", [1], []),
    (CHAT, "allowed_token_ids", [263], [264]),
    (CHAT, "bad_words", ["x"] * 256, ["x"] * 257),
    (CHAT, "bad_words", ["sixteen letters!"], ["seventeen letters"]),
    (CHAT, "bad_words", ["x"], ["  "]),
    (CHAT, "temperature", 0, -0.01),
    (CHAT, "top_p", 1, 1.01),
    (CHAT, "top_p", 0.01, 0),
    (CHAT, "min_p", 1, 1.01),
    (CHAT, "min_p", 0, -0.01),
    (CHAT, "top_k", -1, -2),
    (CHAT, "top_k", 2**31 - 1, 2**31),
    (CHAT, "top_k", 0, 2**63),
    (CHAT, "max_tokens", 1, 0),
    (CHAT, "max_tokens", 1, -1),
    (CHAT, "max_tokens", 1, 2**32),
    (CHAT, "max_tokens", 1, 10**30),
    (CHAT, "stop", ["x"] * 16, ["x"] * 17),
    (CHAT, "stop", "x" * 256, "x" * 257),
    (CHAT, "stop", "é" * 128, "é" * 129),
    (CHAT, "stop", "x", ""),
    (CHAT, "stop_token_ids", [1] * 64, [1] * 65),
    (CHAT, "stop_token_ids", [1], [2**32]),
    (CHAT, "stop_token_ids", [1], ["x"]),
    (CHAT, "top_logprobs", 20, 21),
    (CHAT, "top_logprobs", 0, -1),
    (CHAT, "top_logprobs", 0, 2**32),
    (CHAT, "prompt_logprobs", 20, 21),
    (CHAT, "prompt_logprobs", 0, -1),
    (CHAT, "prompt_logprobs", 0, 2**32),
    (CHAT, "chat_template_kwargs", {f"name{index}": 1 for index in range(32)}, {"tools": []}),
    (CHAT, "chat_template_kwargs", {}, {f"name{index}": 1 for index in range(33)}),
    (CHAT, "chat_template_kwargs", {"a": 2**64 - 1}, {"a": 2**64}),
    (CHAT, "messages", HELLO, []),
    (CHAT, "truncate_prompt_tokens", -1, 0),
    (CHAT, "truncate_prompt_tokens", 2**31 - 1, 2**31),
    (CHAT, "truncate_prompt_tokens", 1, -2),
    (CHAT, "reasoning_effort", "max", "much"),
    (CHAT, "truncation_side", "right", "middle"),
    (COMPLETIONS, "max_tokens", 0, -1),
    (CHAT, "messages", HELLO, HELLO * 4097),
    (COMPLETIONS, "logprobs", 20, 21),
    (COMPLETIONS, "logprobs", 0, -1),
    (COMPLETIONS, "logprobs", 0, 2**32),
    (COMPLETIONS, "prompt", ["x"] * 128, ["x"] * 129),
    (COMPLETIONS, "prompt", ["x"], []),
    (COMPLETIONS, "prompt", ["a", "b"], ["a", ""]),
    (COMPLETIONS, "prompt", [[1], [2]], [[1], [2**32]]),
]


@pytest.mark.parametrize(("route", "field", "bound", "past"), LIMITS, ids=lambda value: str(value)[:24])
def test_a_limit_holds_at_its_bound_and_is_a_400_one_past_it(
    recall_server: Server, route: str, field: str, bound: Any, past: Any
) -> None:
    fields: dict[str, Any] = {"messages": HELLO} if route == CHAT else {"prompt": "x"}
    fields |= {"max_tokens": 1, "logprobs": True} if field == "top_logprobs" else {"max_tokens": 1}
    kept = httpx.post(recall_server.url + route, json=fields | {field: bound}, timeout=120)
    assert kept.status_code == 200, kept.text
    rejected = httpx.post(recall_server.url + route, json=fields | {field: past}, timeout=120)
    assert rejected.status_code == 400
    assert error_of(rejected)["code"] == "invalid_value"
    assert error_of(rejected)["param"].startswith(field)
    assert f"`{field}" in error_of(rejected)["message"]
    assert "; " in error_of(rejected)["message"], "it says what to do"


def test_a_prompt_that_makes_a_library_panic_is_a_400_and_fills_no_log(
    server: StartServer, check_models: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(check_models / "recall-gqa", model, copy_function=shutil.copyfile)
    # minijinja 3.0.5 panics at the reverse of an empty text.
    (model / "chat_template.jinja").write_text("{{ messages[0].content[::-1] }}")
    running = server(model)
    empty = {"messages": [{"role": "user", "content": ""}], "max_tokens": 1}
    rejected = httpx.post(running.url + CHAT, json=empty, timeout=60)
    assert rejected.status_code == 400, rejected.text
    assert httpx.post(running.url + CHAT, json={"messages": HELLO, "max_tokens": 1}, timeout=60).status_code == 200
    assert "panicked" not in running.errors


def test_prompt_logprobs_in_a_stream_are_a_400(recall_server: Server) -> None:
    body = {"messages": HELLO, "stream": True, "prompt_logprobs": 1}
    rejected = httpx.post(recall_server.url + CHAT, json=body, timeout=60)
    assert rejected.status_code == 400
    assert error_of(rejected)["param"] == "prompt_logprobs"


def test_token_ids_outside_the_vocabulary_are_a_400(recall_server: Server) -> None:
    refused = httpx.post(recall_server.url + "/v1/completions", json={"prompt": [1, 999_999]}, timeout=60)
    assert refused.status_code == 400
    assert "999999" in error_of(refused)["message"]


def wait_until(server: Server, name: str, holds: Callable[[float], bool]) -> None:
    """Wait until a sample of `/metrics` is as wanted; raises `TimeoutError`."""
    deadline = time.monotonic() + 60
    while not holds(metric(server, name)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} is {metric(server, name)}")
        time.sleep(0.02)


def test_a_client_that_leaves_gives_its_pages_back(recall_server: Server, recall_steps: SlowSteps) -> None:
    body = {"messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 8000}
    leased = 'plait_kv_pages{state="leased"}'
    with (
        recall_steps.within(),
        httpx.stream("POST", recall_server.url + CHAT, json=body, timeout=60) as response,
    ):
        lines = response.iter_lines()  # to drop it would close the stream
        next(lines)
        wait_until(recall_server, leased, lambda num: num > 0)
    wait_until(recall_server, leased, lambda num: num == 0)
    wait_until(recall_server, "plait_requests_running", lambda num: num == 0)


LONG = {"type": "array", "items": {"const": "kilo"}, "minItems": 300}
"""No answer of a hundred steps validates."""


def num_duplicates(server: Server) -> int:
    """Descriptors of sockets of which the process has another one."""
    sockets = []
    for descriptor in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            sockets += [link for link in (str(descriptor.readlink()),) if link.startswith("socket:")]
    return len(sockets) - len(set(sockets))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": LONG}}}),
        ("/v1/messages", {"max_tokens": 4000, "output_config": {"format": {"type": "json_schema", "schema": LONG}}}),
    ],
)
def test_streams_of_every_protocol_are_handed_over_to_the_writer_thread(
    recall_server: Server, recall_steps: SlowSteps, path: str, fields: dict[str, Any]
) -> None:
    """It writes to a descriptor of its own, so that the process has two of that socket."""
    body = fields | {"messages": HELLO, "stream": True}
    before = num_duplicates(recall_server)
    with (
        recall_steps.within(),
        httpx.stream("POST", recall_server.url + path, json=body, timeout=60) as response,
    ):
        lines = response.iter_lines()  # to drop it would close the stream
        next(lines)
        deadline = time.monotonic() + 60
        while num_duplicates(recall_server) == before:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    wait_until(recall_server, "plait_requests_running", lambda num: num == 0)


def test_a_client_that_never_reads_does_not_hold_up_others(recall_server: Server, client: openai.OpenAI) -> None:
    body = json.dumps({"messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 8000}).encode()
    host, port = recall_server.url.removeprefix("http://").split(":")
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as lazy:
        lazy.sendall(head.encode() + body)
        answer = client.chat.completions.create(model="recall-gqa", messages=HELLO, temperature=0)
        assert answer.choices[0].message.content == "kilo"


def test_a_request_that_waits_too_long_is_a_504(slow_steps: SlowSteps, server: StartServer, check_models: Path) -> None:
    slow_steps.begin()
    small = server(check_models / "recall-gqa", "--max-seqs", "1", "--max-queue-seconds", "0.2")
    body = {"messages": HELLO, "ignore_eos": True, "max_tokens": 8000, "stream": True}
    with httpx.stream("POST", small.url + CHAT, json=body, timeout=60) as response:
        lines = response.iter_lines()  # to drop it would close the stream
        next(lines)
        waited = httpx.post(small.url + CHAT, json=body, timeout=60)
        assert waited.status_code == 504
        assert error_of(waited)["code"] == "queue_timeout"
        assert "at most 0.2 s are allowed (--max-queue-seconds)" in error_of(waited)["message"]
        assert int(waited.headers["retry-after"]) >= 1
        next(lines)  # a request that runs has no deadline
    assert metric(small, 'plait_requests_rejected_total{reason="queue_timeout"}') == 1


USAGE_PROMPT = (
    "Each page of this prompt has sixty-four letters, and each letter is one token; so two pages are cached. "
)


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
def test_the_usage_says_how_much_was_cached_only_to_those_with_a_salt(
    recall_server: Server, route: str, stream: bool
) -> None:
    prompt = f"{route} {stream} {USAGE_PROMPT}"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if route == CHAT else {"prompt": prompt}
    body |= {"max_tokens": 1}
    body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    hidden = [usage(recall_server, route, body) for _ in range(2)]
    assert all("prompt_tokens_details" not in each for each in hidden)
    salted = [usage(recall_server, route, body | {"cache_salt": "mine"}) for _ in range(2)]
    cached = [each["prompt_tokens_details"]["cached_tokens"] for each in salted]
    whole_pages = (salted[0]["prompt_tokens"] - 1) // 64 * 64
    assert whole_pages > 0
    assert cached == [0, whole_pages], "nobody else has the salt"


def usage(running: Server, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """The usage of an answer, whole or streamed."""
    text = httpx.post(running.url + route, json=body, timeout=120).text
    if body.get("stream"):
        text = [line for line in text.splitlines() if line.startswith("data: {")][-1].removeprefix("data: ")
    told: dict[str, Any] = json.loads(text)["usage"]
    return told


def chat(server: Server, typed: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """`plait chat` with `typed` as its input."""
    words = [sys.executable, "-m", "plait.cli", "chat", "--url", server.url, *flags]
    return subprocess.run(words, input=typed, capture_output=True, text=True, timeout=120)


def test_the_terminal_chat_answers_and_leaves_with_ctrl_d(recall_server: Server) -> None:
    done = chat(recall_server, "copy kilo\n\ncopy tuba\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("kilo") < done.stdout.index("tuba")


def test_the_terminal_chat_without_a_server_says_what_to_do() -> None:
    words = [sys.executable, "-m", "plait.cli", "chat", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(words, input="", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "plait serve" in done.stderr.splitlines()[-1]
