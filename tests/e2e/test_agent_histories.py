"""Agents' long histories: the prompt is the one of the same history as a plain chat, and its answer streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from plait_testing.agent_histories import CHAT_TOOLS, DEVELOPER, SYSTEM, claude_code, codex, plain_chat
from plait_testing.running_server import Server, start_server

PAGE_SIZE = 4
NUM_ROUNDS = 40
GREEDY = {"temperature": 0, "stream": True}
TEMPLATE = (
    "{{ enable_thinking }}/{{ reasoning_effort }}{{ tools | tojson }}"
    "{% for m in messages %}<{{ m.role }} {{ m.tool_call_id }}>{{ m.reasoning_content }}|{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}<|assistant|>"
)
"""It writes everything that a message has."""


@pytest.fixture(scope="module")
def agents_server(check_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """recall-gqa, which tells how much of a prompt it had in its cache."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "template.jinja").write_text(TEMPLATE)
    flags = ["--dtype", "float32", "--max-seqs", "4", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details"]
    flags += ["--page-size", str(PAGE_SIZE), "--chat-template", str(folder / "template.jinja")]
    flags += ["--served-model-name", "tiny"]
    one = start_server(folder / "server.log", check_models / "recall-gqa", *flags)
    assert one.url, one.errors
    yield one
    one.kill()


def events(server: Server, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    answer = httpx.post(server.url + path, json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def told_by_chat(server: Server, messages: list[dict[str, Any]], **fields: Any) -> tuple[str, int]:
    """The answer to a plain chat, and the tokens of its prompt."""
    body = {"messages": messages, "tools": CHAT_TOOLS, "max_tokens": 8} | GREEDY | fields
    *chunks, last = events(server, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    return text, last["usage"]["prompt_tokens"]


def cached(num_tokens: int) -> int:
    """Tokens in the pages of an equal prompt before; the last token is computed anew."""
    return (num_tokens - 1) // PAGE_SIZE * PAGE_SIZE


def test_codexs_history_is_the_same_prompt(agents_server: Server) -> None:
    asked = codex(NUM_ROUNDS)
    assert len(asked["input"]) > 5 * NUM_ROUNDS
    instructions = "\n".join(SYSTEM) + "\n\n" + DEVELOPER
    text, num_tokens = told_by_chat(agents_server, plain_chat(NUM_ROUNDS, instructions), reasoning_effort="medium")
    told = events(agents_server, "/v1/responses", asked | GREEDY | {"max_output_tokens": 8}, originator="codex_cli_rs")
    usage = told[-1]["response"]["usage"]
    assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (num_tokens, cached(num_tokens))
    assert "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta") == text


def test_claude_codes_history_is_the_same_prompt(agents_server: Server) -> None:
    asked = claude_code(NUM_ROUNDS)
    assert sum(len(message["content"]) for message in asked["messages"]) > 5 * NUM_ROUNDS
    assert len(asked["messages"]) > 60
    thinks = {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}
    instructions = "\n".join([*SYSTEM, DEVELOPER])
    text, num_tokens = told_by_chat(agents_server, plain_chat(NUM_ROUNDS, instructions), **thinks)
    marked = {"x-app": "cli", "anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    told = events(agents_server, "/v1/messages?beta=true", asked | GREEDY | {"max_tokens": 8}, **marked)
    usage = told[0]["message"]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_tokens
    assert usage["cache_read_input_tokens"] == cached(num_tokens)
    deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == text


def test_another_history_is_another_prompt(agents_server: Server) -> None:
    """So the pages of the others were theirs alone."""
    asked = codex(NUM_ROUNDS) | GREEDY | {"max_output_tokens": 1}
    first = events(agents_server, "/v1/responses", asked)[-1]["response"]["usage"]
    asked["input"][-1]["content"][0]["text"] = "copy lima"
    other = events(agents_server, "/v1/responses", asked)[-1]["response"]["usage"]
    assert 0 < first["input_tokens"] - other["input_tokens_details"]["cached_tokens"] < 30
    assert other["input_tokens_details"]["cached_tokens"] < cached(first["input_tokens"])
