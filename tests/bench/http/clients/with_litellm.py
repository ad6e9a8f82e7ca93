"""litellm's three APIs: chat, `responses()` and Anthropic's Messages, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib import import_module
from typing import Any

from plait_testing.client_checks import ASK, DRAWN, FUNCTION, MODEL, SCHEMA, Checks, check_kind, equal, report

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched
litellm: Any = import_module("litellm")
URL = sys.argv[1]
CHAT = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
RESPONSES = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
MESSAGES = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"}
TOOL = {"type": "function"} | FUNCTION
USED = {"name": "note", "input_schema": SCHEMA}


def chat() -> None:
    asked = CHAT | {"messages": ASK, "temperature": 0, "max_tokens": 8}
    equal(litellm.completion(**asked).choices[0].message.content, "kilo")
    equal("".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **asked)), "kilo")


def response() -> None:
    told = litellm.responses(input=ASK, temperature=0, **RESPONSES)
    equal((told.output[0].content[0].text, told.status), ("kilo", "completed"))
    equal(told.usage.output_tokens, len("kilo") + 1)


def streamed_response() -> None:
    events = list(litellm.responses(input=ASK, temperature=0, stream=True, **RESPONSES))
    equal("".join(event.delta for event in events if event.type == "response.output_text.delta"), "kilo")
    equal(str(getattr(events[-1].type, "value", events[-1].type)), "response.completed")


def structured_response() -> None:
    form = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}
    told = litellm.responses(input=ASK, text=form, max_output_tokens=600, **RESPONSES, **_drawn())
    check_kind(told.output[0].content[0].text)


def tool_of_a_response() -> None:
    """A call and its result; nothing is stored, so that the history goes along."""
    choice = {"type": "function", "name": "note"}
    asked = {"tools": [TOOL], "max_output_tokens": 600} | RESPONSES
    (call,) = litellm.responses(input=ASK, tool_choice=choice, **asked, **_drawn()).output
    check_kind(call.arguments)
    said = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    told = litellm.responses(input=[*ASK, said, result, *ASK], temperature=0, **asked | {"max_output_tokens": 8})
    equal(told.output[0].type, "message")


async def _message(**fields: Any) -> Any:
    return await litellm.anthropic.messages.acreate(messages=ASK, **MESSAGES, **fields)


def message() -> None:
    told = asyncio.run(_message(max_tokens=8, temperature=0))
    equal(([block["text"] for block in told["content"]], told["stop_reason"]), (["kilo"], "end_turn"))
    equal(told["usage"]["output_tokens"], len("kilo") + 1)


async def _streamed(**fields: Any) -> list[dict[str, Any]]:
    """Events, which litellm gives as bytes of the stream."""
    text = b"".join([piece async for piece in await _message(stream=True, **fields)]).decode()
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def streamed_message() -> None:
    events = asyncio.run(_streamed(max_tokens=8, temperature=0))
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    equal(("".join(deltas), events[0]["type"], events[-1]["type"]), ("kilo", "message_start", "message_stop"))


def tool_of_a_message() -> None:
    choice = {"type": "tool", "name": "note", "disable_parallel_tool_use": True}
    asked: dict[str, Any] = {"tools": [USED], "tool_choice": choice, "max_tokens": 600, "temperature": 100}
    (use,) = asyncio.run(_message(**asked))["content"]
    check_kind(json.dumps(use["input"]))
    events = asyncio.run(_streamed(**asked))
    parts = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    check_kind("".join(parts))


def message_by_chat() -> None:
    """litellm's Messages over a server's chat route: the way that it goes to a `hosted_vllm`."""
    asked: dict[str, Any] = CHAT | {"messages": ASK, "max_tokens": 8, "temperature": 0}
    told = asyncio.run(litellm.anthropic.messages.acreate(**asked))
    equal([block["text"] for block in told["content"]], ["kilo"])


def _drawn() -> dict[str, Any]:
    return {"temperature": DRAWN["temperature"], "extra_body": {"seed": DRAWN["seed"]}}


CHECKS: Checks = {
    "chat, whole and streamed": chat,
    "responses()": response,
    "responses(), streamed": streamed_response,
    "responses(), a schema": structured_response,
    "responses(), a tool and its result": tool_of_a_response,
    "anthropic.messages": message,
    "anthropic.messages, streamed": streamed_message,
    "anthropic.messages, a tool": tool_of_a_message,
    "anthropic.messages over chat": message_by_chat,
}

if __name__ == "__main__":
    report(["litellm", "openai"], CHECKS)
