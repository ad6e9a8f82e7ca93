"""Clients of `/v1/responses`, `/v1/messages` and the calls that generate nothing, unchanged.

The SDKs of OpenAI and Anthropic are test dependencies; openai-agents is not, and its test is skipped where it is
missing: `pip install openai-agents`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from plait_testing.agent_requests import CLAUDE_CODE, CODEX
from plait_testing.running_server import Server, start_server
from pydantic import BaseModel

NAMES = ["recall-gqa", "claude-test"]
ASK: list[Any] = [{"role": "user", "content": "copy kilo"}]
DRAWN: dict[str, Any] = {"seed": 1, "temperature": 100}
"""Any token that may come is as likely, so that white space ends soon."""
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["create", "delete"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
FUNCTION: Any = {"type": "function", "name": "note", "parameters": SCHEMA, "strict": True}


class Event(BaseModel):
    """What an answer must be."""

    kind: Literal["create", "delete"]


@pytest.fixture(scope="module")
def server(check_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """recall-gqa with two names, as a model that calls tools as Hermes does and has no thoughts."""
    flags = ["--dtype", "float32", "--max-seqs", "8", "--max-model-len", "2048", "--tool-call-parser", "hermes"]
    flags += ["--served-model-name", *NAMES]
    log = tmp_path_factory.mktemp("server") / "server.log"
    one = start_server(log, check_models / "recall-gqa", *flags)
    assert one.url, one.errors
    yield one
    one.kill()


@pytest.fixture(scope="module")
def sdk(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_every_name_is_listed_taken_and_given_back(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == NAMES
    for name in NAMES:
        assert sdk.models.retrieve(name).id == name
        assert sdk.chat.completions.create(model=name, messages=ASK, max_tokens=1).model == name
        assert sdk.responses.create(model=name, input="x", max_output_tokens=1).model == name
    with pytest.raises(openai.NotFoundError, match="'recall-gqa' or 'claude-test'"):
        sdk.responses.create(model="other", input="x")


def test_a_response_is_the_same_whole_and_in_typed_events(sdk: openai.OpenAI) -> None:
    whole = sdk.responses.create(model=NAMES[0], input=ASK, temperature=0)
    assert (whole.output_text, whole.status) == ("kilo", "completed")
    assert whole.usage is not None
    assert whole.usage.output_tokens == len("kilo") + 1
    with sdk.responses.stream(model=NAMES[0], input=ASK, temperature=0) as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert last.output_text == "kilo"


def test_a_response_at_its_most_tokens_is_incomplete(sdk: openai.OpenAI) -> None:
    cut = sdk.responses.create(model=NAMES[0], input=ASK, temperature=0, max_output_tokens=2)
    assert (cut.status, cut.output_text) == ("incomplete", "ki")
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_the_sdk_parses_a_response_into_its_class(sdk: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": NAMES[0], "input": ASK, "text_format": Event, "max_output_tokens": 600}
    drawn: dict[str, Any] = {"temperature": 100, "extra_body": {"seed": 1}}
    whole = sdk.responses.parse(**given, **drawn)
    assert isinstance(whole.output_parsed, Event)
    with sdk.responses.stream(**given, **drawn) as stream:
        assert stream.get_final_response().output_parsed == whole.output_parsed


def chat_about(sdk: openai.OpenAI, call_id: str, arguments: str) -> str:
    """What a chat answers to a question, a call of it, its result and the question again."""
    function = {"name": "note", "arguments": arguments}
    call: Any = {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
    result: Any = {"role": "tool", "tool_call_id": call_id, "content": "done"}
    messages = [*ASK, call, result, *ASK]
    answer = sdk.chat.completions.create(model=NAMES[0], messages=messages, temperature=0, max_tokens=8)
    return answer.choices[0].message.content or ""


def test_a_call_its_result_and_the_next_answer_go_round(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAMES[0], "temperature": 100, "extra_body": {"seed": 1}, "max_output_tokens": 600}
    choice: Any = {"type": "function", "name": "note"}
    with sdk.responses.stream(input=ASK, tools=[FUNCTION], tool_choice=choice, **asked) as stream:
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    Event.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    history = [*ASK, call.model_dump(exclude={"parsed_arguments"}), result, *ASK]
    answer = sdk.responses.create(model=NAMES[0], input=history, temperature=0, max_output_tokens=8)
    assert answer.output_text == chat_about(sdk, call.call_id, call.arguments)


def test_an_agent_calls_its_tool(server: Server) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    noted: list[str] = []

    @agents.function_tool  # type: ignore[untyped-decorator]
    def note(kind: Literal["create", "delete"]) -> str:
        """Note it."""
        noted.append(kind)
        return "copy kilo"

    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    settings = agents.ModelSettings(
        temperature=100, tool_choice="note", max_tokens=600, extra_body={"seed": 1}, parallel_tool_calls=False
    )
    agent = agents.Agent(
        name="notes",
        model=agents.OpenAIResponsesModel(model=NAMES[0], openai_client=client),
        tools=[note],
        model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )

    async def run_both_ways() -> list[Any]:
        whole = await agents.Runner.run(agent, "copy kilo")
        streamed = agents.Runner.run_streamed(agent, "copy kilo")
        async for _ in streamed.stream_events():
            pass
        return [whole.final_output, streamed.final_output]

    assert asyncio.run(run_both_ways()) == ["copy kilo", "copy kilo"]
    assert len(noted) == 2


def test_a_request_of_codexs_is_answered_in_events(server: Server) -> None:
    headers = {"originator": "codex_cli_rs", "session_id": "019a", "accept": "text/event-stream"}
    body = CODEX | {"model": NAMES[0], "max_output_tokens": 8}
    assert told_events(f"{server.url}/v1/responses", body, headers)[-1] == "response.incomplete"


def test_a_request_of_claude_codes_is_answered_in_events(server: Server) -> None:
    beta = "claude-code-20250219,interleaved-thinking-2025-05-14"
    headers = {"x-api-key": "none", "anthropic-version": "2023-06-01", "anthropic-beta": beta, "x-app": "cli"}
    body = CLAUDE_CODE | {"model": NAMES[1], "max_tokens": 8, "thinking": {"type": "disabled"}}
    told = told_events(f"{server.url}/v1/messages?beta=true", body, headers)
    assert (told[0], told[-2:]) == ("message_start", ["message_delta", "message_stop"])
    counted = {name: value for name, value in body.items() if name not in ("max_tokens", "stream")}
    count = httpx.post(f"{server.url}/v1/messages/count_tokens?beta=true", json=counted, headers=headers, timeout=60)
    assert count.json()["input_tokens"] > 0


def told_events(url: str, body: dict[str, Any], headers: dict[str, str]) -> list[str]:
    """The names of a stream's events."""
    answer = httpx.post(url, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]


def test_the_asynchronous_sdk_reads_typed_events(server: Server) -> None:
    async def read() -> str:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        async with client, client.responses.stream(model=NAMES[0], input=ASK, temperature=0) as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            assert (await stream.get_final_response()).output_text == "kilo"
        return "".join(deltas)

    assert asyncio.run(read()) == "kilo"


def test_a_message_is_the_same_whole_and_streamed(claude: anthropic.Anthropic) -> None:
    given: dict[str, Any] = {"model": NAMES[1], "max_tokens": 16, "messages": ASK, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**given)
    assert [block.text for block in whole.content if block.type == "text"] == ["kilo"]
    assert (whole.stop_reason, whole.model) == ("end_turn", NAMES[1])
    assert whole.usage.output_tokens == len("kilo") + 1
    with claude.messages.stream(**given) as stream:
        assert "".join(stream.text_stream) == "kilo"
        last = stream.get_final_message()
    assert (last.stop_reason, last.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)
    assert claude.messages.count_tokens(model=NAMES[1], messages=ASK).input_tokens == whole.usage.input_tokens


def test_a_message_says_why_it_ended(claude: anthropic.Anthropic) -> None:
    given: dict[str, Any] = {"model": NAMES[1], "messages": ASK, "extra_body": {"temperature": 0}}
    assert claude.messages.create(max_tokens=2, **given).stop_reason == "max_tokens"
    stopped = claude.messages.create(max_tokens=16, stop_sequences=["l"], **given)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "l")


def test_a_tool_is_used_and_its_result_read(claude: anthropic.Anthropic, sdk: openai.OpenAI) -> None:
    tool: Any = {"name": "note", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
    with claude.messages.stream(
        model=NAMES[1],
        max_tokens=600,
        messages=ASK,
        tools=[tool],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body=DRAWN,
    ) as stream:
        message = stream.get_final_message()
    (use,) = message.content
    assert use.type == "tool_use"
    assert message.stop_reason == "tool_use"
    Event.model_validate(use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "done"}
    used = use.model_dump(include={"type", "id", "name", "input"})
    history: Any = [*ASK, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}, *ASK]
    answer = claude.messages.create(
        model=NAMES[1],
        max_tokens=8,
        messages=history,
        thinking={"type": "enabled", "budget_tokens": 1024},
        extra_body={"temperature": 0},
    )
    text = "".join(block.text for block in answer.content if block.type == "text")
    assert text == chat_about(sdk, use.id, json.dumps(use.input))


def test_an_error_has_anthropics_form(claude: anthropic.Anthropic, server: Server) -> None:
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]
    with pytest.raises(anthropic.BadRequestError, match="reads text only") as caught:
        claude.messages.create(model=NAMES[1], max_tokens=1, messages=image)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="`stop_sequences`"):
        claude.messages.create(model=NAMES[1], max_tokens=1, messages=ASK, stop_sequences=[""])
    assert httpx.get(f"{server.url}/v1/messages", timeout=60).json()["type"] == "error"


def test_texts_are_tokenised_and_put_together_again(server: Server) -> None:
    def ask(path: str, **body: Any) -> Any:
        return httpx.post(f"{server.url}{path}", json=body, timeout=60).raise_for_status().json()

    info = httpx.get(f"{server.url}/tokenizer_info", timeout=60).json()
    (end,) = ask("/tokenize", prompt=info["eos_token"], add_special_tokens=False)["tokens"]
    assert ask("/detokenize", tokens=[end])["prompt"] == info["eos_token"]
    answer = ask("/tokenize", prompt="copy", return_token_strs=True)
    assert (answer["count"], answer["token_strs"]) == (4, list("copy"))
    assert "".join(ask("/detokenize", tokens=answer["tokens"])["prompt"]) == "copy"
    assert ask("/tokenize", messages=ASK)["count"] == ask("/v1/responses/input_tokens", input=ASK)["input_tokens"]


def test_gateways_find_what_they_probe(server: Server) -> None:
    assert httpx.get(f"{server.url}/version", timeout=60).json()["version"]
    assert httpx.get(f"{server.url}/ping", timeout=60).status_code == 200
    assert httpx.post(f"{server.url}/ping", timeout=60).status_code == 200
    assert json.loads(httpx.get(f"{server.url}/load", timeout=60).text) == {"server_load": 0}
