"""Calls that must come, strict tools and thoughts with a budget: a model that knows none of it still holds to it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server, start_server

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' if enable_thinking else '<think></think>' }}"
"""A model that thinks only if it is told to."""
PLAN: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 5},
        "days": {"type": "integer", "minimum": 1, "maximum": 12},
        "unit": {"enum": ["c", 'f"', None]},
        "tags": {"type": "array", "items": {"enum": [True, "x"]}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        "year": {"$ref": "#/$defs/Year"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Year": {"type": "string", "pattern": "^[0-9]{4}$"}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "plan", "parameters": PLAN}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "plan"}}
ALLOWED: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
ASK: Any = [{"role": "user", "content": "hi"}]
CASES = {
    "hermes": ("recall-gqa", "hermes"),
    "no-mixed-qwen3-coder": ("recall-gqa", "qwen3_coder", "--no-mixed"),
    "no-overlap-pythonic": ("recall-gqa", "pythonic", "--no-overlap"),
    "chunks-glm45": ("recall-gqa", "glm45", "--long-prefill-token-threshold", "64"),
    "preempted-llama3-json": ("recall-gqa", "llama3_json", "--num-pages", "70"),
    "tp-2-deepseek-v31": ("recall-mla", "deepseek_v31", "--tp", "2"),
}
REDUCED = {"hermes": 6}
"""Questions of the cases that are not for full sizes alone."""


def start(folder: Path, models: Path, model: str, parser: str, *flags: str) -> Server:
    (folder / "template.jinja").write_text(TEMPLATE)
    own = ["--dtype", "float32", "--max-seqs", "8", "--page-size", "16", "--chat-template"]
    own += [str(folder / "template.jinja"), "--tool-parser", parser, "--reasoning-parser", "qwen3"]
    server = start_server(folder / "server.log", models / model, *own, *flags)
    assert server.url, server.errors
    return server


@pytest.fixture(scope="module")
def server(check_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """recall-gqa as a model of Hermes' family."""
    one = start(tmp_path_factory.mktemp("server"), check_models, "recall-gqa", "hermes")
    yield one
    one.kill()


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(server: Server, **fields: Any) -> Any:
    body = {"messages": ASK, "temperature": 1, "max_tokens": 900} | fields
    return httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).json()


def whole(client: openai.OpenAI, model: str, fields: dict[str, Any]) -> tuple[list[tuple[str, str]], str]:
    answer: Any = client.chat.completions.create(model=model, messages=ASK, **fields)
    (choice,) = answer.choices
    # The beginning of a call that the limit cuts off is text.
    assert choice.message.content is None or choice.finish_reason == "length"
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls], choice.finish_reason


def streamed(client: openai.OpenAI, model: str, fields: dict[str, Any]) -> tuple[list[tuple[str, str]], str]:
    calls, reason, content = list[tuple[str, str]](), "", ""
    stream: Any = client.chat.completions.create(model=model, messages=ASK, stream=True, **fields)
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.id:
                calls.append((call.function.name, ""))
            name, arguments = calls[call.index]
            calls[call.index] = name, arguments + (call.function.arguments or "")
        reason = choice.finish_reason or reason
    assert not content or reason == "length"
    return calls, reason


def check_plan(plan: Any) -> None:
    """What `PLAN` says."""
    assert {"city", "days"} <= set(plan) <= set(PLAN["properties"])
    assert 1 <= len(plan["city"]) <= 5
    assert type(plan["days"]) is int
    assert 1 <= plan["days"] <= 12
    assert plan.get("unit") in ("c", 'f"', None)
    tags = plan.get("tags", [])
    assert len(tags) <= 2
    assert all(tag is True or tag == "x" for tag in tags)
    assert len(plan.get("note") or "") <= 4
    assert re.fullmatch("[0-9]{4}", plan.get("year", "2026"))


def check(calls: list[tuple[str, str]]) -> None:
    assert calls
    for name, arguments in calls:
        if name == "plan":
            check_plan(json.loads(arguments))
        else:
            assert (name, json.loads(arguments)) == ("now", {})


def question(number: int) -> dict[str, Any]:
    """One of three kinds of requests, of many seeds and temperatures."""
    choice = ("required", NAMED, {"type": "allowed_tools", "allowed_tools": ALLOWED})[number % 3]
    return {
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": number % 4 == 0,
        "seed": number,
        "temperature": (0, 1, 2)[number // 3 % 3],
        "max_tokens": 900,
    }


@pytest.mark.acceptance("cpu")
@pytest.mark.parametrize("case", CASES)
def test_calls_that_must_come_validate_streamed_and_whole(
    check_models: Path, tmp_path: Path, sized: Callable[[int, int], int], case: str
) -> None:
    num = sized(REDUCED.get(case, 0), 100)
    if num == 0:
        pytest.skip("for full sizes")
    model, parser, *flags = CASES[case]
    server = start(tmp_path, check_models, model, parser, *flags)
    client = client_of(server)

    def both(number: int) -> None:
        fields = question(number)
        (calls, reason), said = whole(client, model, fields), streamed(client, model, fields)
        assert (calls, reason) == said
        if reason == "length":  # of calls without end
            assert fields["parallel_tool_calls"]
            assert len(calls) > 1
            return check(calls[:-1])
        check(calls)
        assert reason == ("stop" if fields["tool_choice"] is NAMED else "tool_calls")
        if fields["tool_choice"] is NAMED:
            assert [name for name, _ in calls] == ["plan"]
        elif fields["tool_choice"] != "required":
            assert {name for name, _ in calls} == {"now"}

    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(both, range(num)))
    finally:
        server.kill()


def test_a_function_may_be_named_by_its_older_name(server: Server) -> None:
    functions = [tool["function"] for tool in TOOLS]
    choice = ask(server, functions=functions, function_call={"name": "plan"})["choices"][0]
    call = choice["message"]["function_call"]
    check([(call["name"], call["arguments"])])
    assert (call["name"], choice["finish_reason"]) == ("plan", "stop")


def test_every_choice_of_an_answer_has_its_calls(server: Server) -> None:
    choices = ask(server, n=3, tools=TOOLS, tool_choice="required", seed=1)["choices"]
    for choice in choices:
        calls = [call["function"] for call in choice["message"]["tool_calls"]]
        check([(call["name"], call["arguments"]) for call in calls])
    assert len(choices) == 3


def test_a_strict_tool_leaves_text_free(server: Server) -> None:
    strict = [{"type": "function", "function": {"name": "now", "strict": True}}]
    choice = ask(server, tools=strict, max_tokens=20, logit_bias={"97": 100})["choices"][0]
    assert choice["message"]["content"] == "a" * 20
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_thought_ends_when_its_budget_is_spent(server: Server, budget: int) -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": True}, "logit_bias": {"97": 100}}
    answer = ask(server, thinking_token_budget=budget, max_tokens=20, **fields)
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content") or "") == "a" * budget
    assert message["content"] == "a" * (20 - budget - len("</think>"))


def test_calls_and_structured_output_come_behind_the_thought(server: Server) -> None:
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 5}
    message = ask(server, tools=TOOLS, tool_choice="required", seed=4, **fields)["choices"][0]["message"]
    check([(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]])
    held = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["on", "off"]}}}
    choice = ask(server, response_format=held, seed=4, **fields)["choices"][0]
    assert json.loads(choice["message"]["content"]) in ("on", "off")
    assert choice["finish_reason"] == "stop"


def test_calls_that_must_come_are_counted(server: Server) -> None:
    name = 'plait_constrained_requests_total{kind="tools"}'
    before = read_metrics(server.url)[name]
    ask(server, tools=TOOLS, tool_choice="required", max_tokens=1)
    ask(server, tools=TOOLS, max_tokens=1)
    assert read_metrics(server.url)[name] - before == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "leap"}}}, "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 3}, "min_tokens"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": "few"}, "thinking_token_budget"),
        ({"thinking_token_budget": 3, "bad_words": ["a"]}, "bad_words"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": True}} | fields
    assert ask(server, **fields)["error"]["param"] == param
