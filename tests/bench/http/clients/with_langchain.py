"""langchain-openai: `ChatOpenAI` over chats and over Responses."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from plait_testing.client_checks import DRAWN, FUNCTION, MODEL, SCHEMA, Checks, equal, report

TITLED = SCHEMA | {"title": "note"}
TOOL = {"type": "function", "function": FUNCTION}


def model(**fields: Any) -> Any:
    chat = import_module("langchain_openai").ChatOpenAI
    return chat(base_url=f"{sys.argv[1]}/v1", api_key="none", model=MODEL, max_retries=0, **fields)


def drawn(**fields: Any) -> Any:
    return model(**DRAWN, max_tokens=600, **fields)


def texts(**fields: Any) -> None:
    greedy = model(temperature=0, **fields)
    equal(str(greedy.invoke("copy kilo").text), "kilo")
    equal("".join(str(chunk.text) for chunk in greedy.stream("copy kilo")), "kilo")
    equal([str(answer.text) for answer in greedy.batch(["copy kilo", "copy lima"])], ["kilo", "lima"])


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        told = drawn().with_structured_output(TITLED, method=method).invoke("copy kilo")
        equal((list(told), told["kind"] in SCHEMA["properties"]["kind"]["enum"]), (["kind"], True))


def tool() -> None:
    """A call, streamed as it comes whole, and its result in a second turn."""
    messages = import_module("langchain_core.messages")
    bound = drawn().bind_tools([TOOL], tool_choice="note", parallel_tool_calls=False)
    whole = bound.invoke("copy kilo")
    first, *rest = bound.stream("copy kilo")
    for chunk in rest:
        first = first + chunk
    equal([call["args"] for call in first.tool_calls], [call["args"] for call in whole.tool_calls])
    (call,) = whole.tool_calls
    result = messages.ToolMessage("done", tool_call_id=call["id"])
    told = model(temperature=0, max_tokens=8).bind_tools([TOOL])
    equal(told.invoke([messages.HumanMessage("copy kilo"), whole, result]).response_metadata["model_name"], MODEL)


CHECKS: Checks = {
    "chats, whole, streamed and in batches": texts,
    "Responses, whole, streamed and in batches": lambda: texts(use_responses_api=True),
    "a schema": structured,
    "a tool and its result": tool,
}

if __name__ == "__main__":
    report(["langchain-openai", "openai"], CHECKS)
