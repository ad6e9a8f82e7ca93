"""What the front door makes of the bodies of Anthropic's `/v1/messages`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plait.http.api import GenerateRequest
from plait.http.errors import ApiError, body_for, error_event
from plait.http.messages import read_message, read_message_to_count
from plait.http.messages_body import UNSUPPORTED_MESSAGES
from plait_testing.agent_requests import CLAUDE_CODE

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {
    "name": "Bash",
    "description": "Run.",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}


def message(**fields: Any) -> GenerateRequest:
    return read_message(json.dumps({"messages": HELLO, "max_tokens": 64, **fields}).encode(), ("tiny",))


def rejection(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        message(**fields)
    assert caught.value.status == 400
    return caught.value


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def use(call_id: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "Bash", "input": given}


def result(call_id: str, content: Any = "done", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def said(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def test_a_plain_message_is_a_chat_without_thoughts() -> None:
    request = message(system=[text("a"), text("b", cache_control={"type": "ephemeral"})], stop_sequences=["x"])
    assert request.messages == [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "hello"}]
    assert (request.max_tokens, request.stop, request.protocol.name) == (64, ["x"], "messages")
    assert (request.reasoning_effort, request.include_reasoning) == ("none", False)


def test_blocks_become_messages_with_calls_and_results() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    request = message(
        messages=[
            said("user", text("go")),
            said("assistant", redacted, thought, text("I look."), use("1", city="Rome"), use("2")),
            said("user", text("and?"), result("2", [text("a"), text("b")]), result("1", "no", is_error=True)),
        ]
    )
    calls = [
        {"id": "1", "type": "function", "function": {"name": "Bash", "arguments": {"city": "Rome"}}},
        {"id": "2", "type": "function", "function": {"name": "Bash", "arguments": {}}},
    ]
    assert request.messages == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": "a\nb"},
        {"role": "tool", "tool_call_id": "1", "content": "Error: no"},
        {"role": "user", "content": "and?"},
    ]


def test_a_last_message_of_the_assistant_is_continued() -> None:
    request = message(messages=[*HELLO, {"role": "assistant", "content": "Once"}])
    assert (request.continue_final_message, request.add_generation_prompt) == (True, False)
    assert not message().continue_final_message


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({"type": "disabled"}, ("none", None, False)),
        ({"type": "enabled", "budget_tokens": 32}, (None, 32, True)),
        ({"type": "enabled", "budget_tokens": 63}, (None, None, True)),
        ({"type": "adaptive"}, (None, None, True)),
        ({"type": "adaptive", "display": "omitted"}, (None, None, False)),
    ],
)
def test_thinking_says_whether_the_model_thinks_and_how_long(
    thinking: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    request = message(thinking=thinking)
    assert (request.reasoning_effort, request.thinking_token_budget, request.include_reasoning) == expected
    assert bool(request.chat_template_kwargs.get("enable_thinking")) == (thinking["type"] != "disabled")


def test_an_effort_goes_to_the_template_of_a_model_that_thinks() -> None:
    request = message(thinking={"type": "adaptive"}, output_config={"effort": "low"})
    assert (request.reasoning_effort, request.chat_template_kwargs) == ("low", {})


@pytest.mark.parametrize(
    ("choice", "mode", "single"),
    [
        ({"type": "auto"}, "auto", False),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", True),
        ({"type": "tool", "name": "Bash"}, "named", False),
        ({"type": "none"}, "none", False),
    ],
)
def test_tools_and_their_choice_reach_the_engine(choice: dict[str, Any], mode: str, single: bool) -> None:
    request = message(tools=[TOOL], tool_choice=choice)
    function = {"name": "Bash", "description": "Run.", "parameters": {"type": "object"}}
    assert request.tools == [{"type": "function", "function": function}]
    assert (request.tool_choice.mode, request.single_call) == (mode, single)


@pytest.mark.parametrize("place", [{"output_config": {"format": None}}, {"output_format": None}])
def test_a_form_of_the_answer_is_a_constraint(place: dict[str, Any]) -> None:
    asked = {"type": "json_schema", "schema": {"type": "object"}}
    fields = {name: asked if inner is None else {"format": asked} for name, inner in place.items()}
    constraint = message(**fields).constraint
    assert constraint is not None
    assert json.loads(constraint.text) == asked["schema"]


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_MESSAGES))
def test_what_this_server_lacks_is_refused_by_its_name(name: str) -> None:
    error = rejection(**{name: "surely not neutral"})
    assert (error.param, error.code) == (name, "unsupported_value")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [said("user", {"type": "image", "source": {}})]}, "messages[0].content[0].type"),
        ({"messages": [said("user", {"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [said("robot", text("x"))]}, "messages[0].role"),
        ({"messages": [said("assistant", {"type": "server_tool_use"})]}, "messages[0].content[0].type"),
        ({"messages": [said("user", result("1"))]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [said("assistant", use("1")), said("user", result("1", [{"type": "image"}]))]},
            "messages[1].content[0].content[0].type",
        ),
        ({"system": [{"type": "document"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0].type",
        ),
        ({"max_tokens": None}, "max_tokens"),
    ],
)
def test_a_field_that_is_not_allowed_is_named(fields: dict[str, Any], param: str) -> None:
    error = rejection(**fields)
    assert error.param == param
    assert f"`{param}`" in error.message


def test_tokens_are_counted_without_max_tokens() -> None:
    request = read_message_to_count(json.dumps({"messages": HELLO}).encode(), ("tiny",))
    assert (request.max_tokens, request.messages) == (None, HELLO)


def test_errors_have_anthropics_form_on_its_paths_alone() -> None:
    body = ApiError(413, "too large").body()
    told = {"type": "error", "error": {"type": "request_too_large", "message": "too large"}}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert json.loads(body_for(path, 413, body)) == told
    assert body_for("/v1/messages2", 413, body) == body
    assert (
        error_event("/v1/messages", 413, body)
        == b"event: error\ndata: " + json.dumps(told).encode().replace(b": ", b":").replace(b", ", b",") + b"\n\n"
    )
    assert error_event("/v1/chat/completions", 413, body) == b"data: " + body + b"\n\n"


def test_a_request_of_claude_codes_shape_is_taken() -> None:
    request = read_message(json.dumps(CLAUDE_CODE).encode(), ("tiny",))
    assert [it["role"] for it in request.messages] == ["system", "user", "assistant", "tool", "user"]
    assert (request.thinking_token_budget, request.include_reasoning, request.stream) == (None, True, True)


def test_many_blocks_in_a_row_are_joined_once() -> None:
    blocks = [text("x"), {"type": "thinking", "thinking": "y"}] * 50_000
    (only,) = message(messages=[said("assistant", *blocks)]).messages
    assert only == {
        "role": "assistant",
        "content": "\n".join("x" * 50_000),
        "reasoning_content": "\n".join("y" * 50_000),
    }
