"""Tools and thoughts through the front door: streamed, whole and by the openai SDK."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from plait_testing.running_server import Server, start_server

CHAT = "/v1/chat/completions"
CALL = "[f()]"
"""A call in Python's way. The letters differ, so that forbidding pairs of them leaves one way through."""
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}{{ tools | tojson if tools }}{{ '<think>' if enable_thinking }}"
)
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
FORCED: dict[str, Any] = {
    "allowed_token_ids": [*CALL.encode(), 257],
    "bad_words": [a + b for a, b in product(CALL, repeat=2) if (a, b) not in pairwise(CALL)],
    "logit_bias": {str(CALL.encode()[0]): 100},
    "min_tokens": len(CALL),
}
"""The model's answer is `CALL` and the end token."""
ASK: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tools_server(check_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """recall-gqa, whose tokens are bytes, as a model that calls tools in Python's way."""
    folder = tmp_path_factory.mktemp("server")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ["--dtype", "float32", "--max-seqs", "8", "--max-model-len", "1024", "--chat-template", str(template)]
    flags += ["--tool-call-parser", "pythonic", "--enable-auto-tool-choice"]
    one = start_server(folder / "server.log", check_models / "recall-gqa", *flags)
    assert one.url, one.errors
    yield one
    one.kill()


@pytest.fixture(scope="module")
def client(tools_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tools_server.url}/v1", api_key="none", max_retries=0)


def ask(server: Server, **fields: Any) -> Any:
    body = {"messages": ASK, "temperature": 0, "max_tokens": 8} | fields
    return httpx.post(server.url + CHAT, json=body, timeout=60).json()


def gathered(client: openai.OpenAI, **fields: Any) -> tuple[str, list[tuple[str, str]], str | None]:
    """Content, names and arguments of calls, and the reason of the end, from a stream."""
    content, calls, reason = "", list[tuple[str, str]](), None
    stream = client.chat.completions.create(model="recall-gqa", messages=ASK, stream=True, temperature=0, **fields)
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.id:
                calls.append((call.function.name or "", ""))
            name, arguments = calls[call.index]
            calls[call.index] = name, arguments + (call.function.arguments or "")
        reason = choice.finish_reason or reason
    return content, calls, reason


def test_a_call_is_the_same_streamed_and_whole(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "max_tokens": 8, "extra_body": FORCED}
    assert gathered(client, **fields) == ("", [("f", "{}")], "tool_calls")
    whole = client.chat.completions.create(model="recall-gqa", messages=ASK, temperature=0, **fields)
    message = whole.choices[0].message
    assert (message.content, whole.choices[0].finish_reason) == (None, "tool_calls")
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("f", "{}")


def test_calls_are_text_where_no_tool_may_be_called(tools_server: Server) -> None:
    for tools in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        choice = ask(tools_server, **FORCED, **tools)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


def test_functions_are_tools_under_their_older_name(tools_server: Server) -> None:
    choice = ask(tools_server, functions=[TOOL["function"]], **FORCED)["choices"][0]
    assert choice["message"]["function_call"] == {"name": "f", "arguments": "{}"}
    assert choice["finish_reason"] == "function_call"


def test_outcomes_of_calls_are_counted(tools_server: Server) -> None:
    def counts() -> dict[str, float]:
        lines = httpx.get(tools_server.url + "/metrics", timeout=60).text.splitlines()
        names = [line.split() for line in lines if line.startswith("plait_tool_calls_total")]
        return {name.split('"')[1]: float(value) for name, value in names}

    before = counts()
    ask(tools_server, tools=[TOOL], **FORCED)
    ask(tools_server, tools=[TOOL], **(FORCED | {"max_tokens": 3, "min_tokens": 3}))
    other = TOOL | {"function": {"name": "g"}}
    ask(tools_server, tools=[other], **FORCED)
    assert {name: value - before[name] for name, value in counts().items()} == {
        "complete": 1,
        "cut_off": 1,
        "as_text": 1,
    }


def test_the_template_sees_the_tools_and_arguments_as_objects(tools_server: Server) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    messages = [*ASK, {"role": "assistant", "tool_calls": [call]}]
    ids = ask(tools_server, messages=messages, tools=[TOOL], return_token_ids=True, max_tokens=1)["prompt_token_ids"]
    prompt = bytes(token for token in ids if token < 256).decode()
    assert prompt.startswith('hi{"x": "é"}[{"type": "function", "function": {"name": "f"')


def test_a_thought_that_the_template_opens_comes_apart(tools_server: Server) -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": True}, "ignore_eos": True, "allowed_token_ids": [97]}
    answer = ask(tools_server, max_tokens=5, **fields)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("aaaaa", "aaaaa", "")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    message = ask(tools_server, max_tokens=5, include_reasoning=False, **fields)["choices"][0]["message"]
    assert "reasoning_content" not in message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]}, "messages[0]"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(tools_server: Server, fields: dict[str, Any], param: str) -> None:
    assert ask(tools_server, **fields)["error"]["param"] == param
