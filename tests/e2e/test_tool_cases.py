"""A hundred chats with drawn tools through the openai SDK: one tool, several, one by name, and none that fits."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from plait_testing.running_server import Server, start_server

KINDS = ("one", "several", "named", "parallel", "none fits")
NUM_CASES = 100
REDUCED = 20
"""Cases of each run that is not at full size."""
WORDS = ("city", "when", "unit", "size", "note", "für", "a b", 'q"x', "tag_1", "n")


@dataclass(frozen=True)
class Case:
    """A chat's tools, and what must come of it."""

    kind: str
    seed: int
    tools: list[Any]

    @property
    def fields(self) -> dict[str, Any]:
        choice: Any = "required"
        if self.kind == "named":
            choice = {"type": "function", "function": {"name": self.tools[-1]["function"]["name"]}}
        elif self.kind == "none fits":
            choice = "auto"
        # Where any token that may come is as likely, white space ends soon.
        temperature = 0 if self.kind == "none fits" else 100
        drawn = {"temperature": temperature, "seed": self.seed, "max_tokens": 1500}
        return drawn | {"tools": self.tools, "tool_choice": choice, "parallel_tool_calls": self.kind == "parallel"}


def drawn_value(r: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["text", "pattern", "integer", "boolean", "enum", "null"] + ["list", "object"] * (depth > 0)
    match r.choice(kinds):
        case "text":
            return {"type": "string", "maxLength": r.randint(0, 6)}
        case "pattern":
            return {"type": "string", "pattern": "^[a-f]{1,3}$"}
        case "integer":
            return {"type": "integer", "minimum": -5, "maximum": r.randint(0, 999)}
        case "enum":
            return {"enum": r.sample(["a", "<b>", 'c"', "é", None, 3, True], 3)}
        case "list":
            return {"type": "array", "items": drawn_value(r, depth - 1), "maxItems": 2}
        case "object":
            return drawn_object(r, depth - 1)
        case kind:
            return {"type": kind}


def drawn_object(r: random.Random, depth: int) -> dict[str, Any]:
    names = r.sample(WORDS, r.randint(0, 3))
    properties = {name: drawn_value(r, depth) for name in names}
    required = [name for name in names if r.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def drawn_case(number: int) -> Case:
    r = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    tools = [
        {"type": "function", "function": {"name": f"tool_{index}", "parameters": drawn_object(r, 2)}}
        for index in range(1 if kind == "one" else r.randint(2, 4))
    ]
    return Case(kind, number, tools)


def holds(schema: dict[str, Any], value: Any) -> bool:
    """Whether the schema, of those that `drawn_value` makes, holds for the value."""
    if "enum" in schema:
        return any(type(value) is type(one) and value == one for one in schema["enum"])
    match schema["type"]:
        case "object":
            own = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(own)
                and all(holds(own[name], inner) for name, inner in value.items())
            )
        case "array":
            return isinstance(value, list) and len(value) <= 2 and all(holds(schema["items"], one) for one in value)
        case "string":
            is_long = isinstance(value, str) and len(value) > schema.get("maxLength", len(value))
            return isinstance(value, str) and not is_long and re.search(schema.get("pattern", ""), value) is not None
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case _:
            return value is None


@pytest.fixture(scope="module")
def tools_server(check_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """recall-gqa as a model of Hermes' family."""
    flags = ["--dtype", "float32", "--max-seqs", "8", "--max-model-len", "2048", "--tool-parser", "hermes"]
    one = start_server(tmp_path_factory.mktemp("server") / "server.log", check_models / "recall-gqa", *flags)
    assert one.url, one.errors
    yield one
    one.kill()


Said = tuple[str, list[tuple[str, str]], str | None]


def said_whole(client: openai.OpenAI, case: Case) -> Said:
    """Content, names and arguments of calls, and the reason of the end."""
    answer = client.chat.completions.create(model="recall-gqa", messages=messages(), **case.fields)
    message, reason = answer.choices[0].message, answer.choices[0].finish_reason
    calls: list[Any] = list(message.tool_calls or [])
    return message.content or "", [(call.function.name, call.function.arguments) for call in calls], reason


def said_streamed(client: openai.OpenAI, case: Case) -> Said:
    with client.chat.completions.stream(model="recall-gqa", messages=messages(), **case.fields) as stream:
        list(stream)
        snapshot: Any = stream.current_completion_snapshot
    message = snapshot.choices[0].message
    calls = list(message.tool_calls or [])
    said = [(call.function.name, call.function.arguments) for call in calls]
    return message.content or "", said, snapshot.choices[0].finish_reason


def messages() -> list[Any]:
    return [{"role": "user", "content": "copy kilo"}]


def check(case: Case, said: Said) -> None:
    content, calls, reason = said
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in case.tools}
    if case.kind == "none fits":
        assert (bool(content), calls) == (True, []), "a model that knows no tools answers in words"
        return
    assert reason == ("stop" if case.kind == "named" else "tool_calls"), said
    assert len(calls) == 1 or case.kind == "parallel"
    assert calls
    for name, arguments in calls:
        assert holds(schemas[name], json.loads(arguments)), (name, arguments)
    if case.kind == "named":
        assert calls[0][0] == case.tools[-1]["function"]["name"]


@pytest.mark.acceptance("cpu")
def test_forced_calls_validate_and_streams_say_the_same(tools_server: Server, sized: Callable[[int, int], int]) -> None:
    client = openai.OpenAI(base_url=f"{tools_server.url}/v1", api_key="none", max_retries=0, timeout=300)
    cases = [drawn_case(number) for number in range(sized(REDUCED, NUM_CASES))]
    with ThreadPoolExecutor(8) as pool:
        whole = list(pool.map(lambda case: said_whole(client, case), cases))
        streamed = list(pool.map(lambda case: said_streamed(client, case), cases))
    for case, one, other in zip(cases, whole, streamed, strict=True):
        check(case, one)
        assert one == other
