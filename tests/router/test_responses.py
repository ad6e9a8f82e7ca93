"""What the front door makes of the bodies of `/v1/responses`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plait.http.api import GenerateRequest
from plait.http.errors import ApiError
from plait.http.responses import MAX_ITEMS, read_response
from plait.http.responses_body import UNSUPPORTED_RESPONSES
from plait_testing.agent_requests import CODEX

TOOL = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}, "strict": False}


def response(**fields: Any) -> GenerateRequest:
    return read_response(json.dumps({"input": "hello", **fields}).encode(), ("tiny", "other"))


def messages(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return response(input=list(items), **fields).messages


def rejection(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        response(**fields)
    assert caught.value.status == 400
    return caught.value


def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "shell", "arguments": arguments}


def output(call_id: str, output: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def test_a_text_is_what_the_user_says_behind_the_instructions() -> None:
    request = response(instructions="Be brief.", max_output_tokens=7, temperature=0.5, model="other")
    assert request.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert (request.max_tokens, request.sampling.temperature, request.model) == (7, 0.5, "other")
    assert request.protocol.name == "responses"


def test_items_in_a_row_of_the_assistant_are_one_message_and_results_follow() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    user = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    rendered = messages(user, thought, said, call("1"), call("2"), output("2"), output("1", [user["content"][0]]))
    calls = [{"id": it, "type": "function", "function": {"name": "shell", "arguments": "{}"}} for it in "12"]
    assert rendered == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": "done"},
        {"role": "tool", "tool_call_id": "1", "content": "a"},
    ]


def test_leading_instructions_are_one_message() -> None:
    developer = {"type": "message", "role": "developer", "content": "No network."}
    rendered = messages(developer, {"role": "user", "content": "hi"}, developer, instructions="Be brief.")
    assert [it["role"] for it in rendered] == ["system", "user", "system"]
    assert rendered[0]["content"] == "Be brief.\n\nNo network."


def test_what_is_asked_of_tools_form_and_thoughts_reaches_the_engine() -> None:
    schema = {"type": "object"}
    request = response(
        tools=[TOOL],
        tool_choice={"type": "function", "name": "shell"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        reasoning={"effort": "low", "summary": "auto"},
    )
    function = {"name": "shell", "parameters": TOOL["parameters"], "strict": False}
    assert request.tools == [{"type": "function", "function": function}]
    assert (request.tool_choice.mode, request.tool_choice.names, request.single_call) == ("named", ["shell"], True)
    assert request.constraint is not None
    assert json.loads(request.constraint.text) == schema
    assert request.reasoning_effort == "low"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "shell"}]}
    assert response(tools=[TOOL], tool_choice=allowed).tool_choice.names == ["shell"]


def test_the_response_repeats_the_request_on_one_line() -> None:
    body = {"input": "hi", "metadata": {"a": "b\nc"}, "tools": [TOOL], "user": "me", "text": None}
    fields = read_response(json.dumps(body, indent=2).encode(), ("tiny",)).protocol.fields
    assert "\n" not in fields
    repeated = json.loads(fields)
    assert repeated["metadata"] == body["metadata"]
    assert repeated["tools"] == [TOOL | {"description": None}]
    assert repeated["text"] == {"format": {"type": "text"}}
    assert (repeated["model"], repeated["store"], repeated["tool_choice"]) == ("tiny", False, "auto")


@pytest.mark.parametrize(
    ("name", "given", "repeated"),
    [
        ("reasoning", {"effort": "low"}, {"effort": "low", "summary": None}),
        ("text", {"format": {"type": "json_object"}}, {"format": {"type": "json_object"}}),
        ("text", {"verbosity": "medium"}, {"format": {"type": "text"}, "verbosity": "medium"}),
        ("tool_choice", {"type": "function", "name": "shell"}, {"type": "function", "name": "shell"}),
        (
            "tool_choice",
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "shell"}]},
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "shell"}]},
        ),
    ],
)
def test_the_response_repeats_no_name_that_the_api_does_not_have(name: str, given: Any, repeated: Any) -> None:
    fields = response(tools=[TOOL], **{name: given | {"k" * 100_000: 1}}).protocol.fields
    assert json.loads(fields)[name] == repeated
    assert len(fields) < 1000


def test_a_schema_is_repeated_with_its_name() -> None:
    asked = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    repeated = json.loads(response(text={"format": asked}).protocol.fields)
    assert repeated["text"] == {"format": asked}


def test_what_changes_nothing_here_is_taken() -> None:
    response(
        store=True,
        include=["reasoning.encrypted_content"],
        truncation="disabled",
        background=False,
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        metadata={"a": "b"},
        stream=True,
        stream_options={"include_obfuscation": False},
    )


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_RESPONSES))
def test_what_this_server_lacks_is_refused_by_its_name(name: str) -> None:
    error = rejection(**{name: "surely not neutral"})
    assert (error.param, error.code) == (name, "unsupported_value")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [output("1")]}, "input[0].call_id"),
        ({"input": [call("1"), {"role": "user", "content": "x"}, output("1")]}, "input[2].call_id"),
        ({"input": [call("1", "[]")]}, "input[0].arguments"),
        ({"input": [call("1", '{"a":' + "[" * 3000)]}, "input[0].arguments"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata[...]"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"input": [call("1"), {"type": "function_call_output", "call_id": "1"}]}, "input[1].output"),
        ({"input": [{"role": "user", "content": "x"}] * (MAX_ITEMS + 1)}, "input"),
        ({"input": 5}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "apply_patch"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
def test_a_field_that_is_not_allowed_is_named(fields: dict[str, Any], param: str) -> None:
    error = rejection(**fields)
    assert error.param == param
    assert f"`{param}`" in error.message


def test_a_missing_input_is_named() -> None:
    with pytest.raises(ApiError, match="`input` is missing"):
        read_response(b"{}", ("tiny",))


def test_another_model_is_not_found_and_all_names_are_told() -> None:
    with pytest.raises(ApiError, match="'tiny' or 'other'") as caught:
        response(model="gpt")
    assert caught.value.status == 404


def test_a_request_of_codexs_shape_is_taken() -> None:
    request = read_response(json.dumps(CODEX).encode(), ("tiny",))
    assert [it["role"] for it in request.messages] == ["system", "user", "user", "assistant", "tool"]
    assert request.stream
    assert len(request.tools) == 2


def test_what_a_client_did_not_name_is_no_null_where_openai_has_a_text() -> None:
    asked = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    told = json.loads(response(text={"format": asked}).protocol.fields)
    assert "user" not in told
    assert "description" not in told["text"]["format"]
    told = json.loads(response(text={"format": asked | {"description": "d"}}, user="u").protocol.fields)
    assert (told["user"], told["text"]["format"]["description"]) == ("u", "d")
