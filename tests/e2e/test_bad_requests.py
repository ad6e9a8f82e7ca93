"""What cannot be asked for: each is a 400 that names the field, and the server's memory is back where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from plait_testing.running_server import Server, start_server

ASK: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MAX_GROWTH = 24 << 20
"""Bytes that the server may keep of later rounds of refused requests: those of one round, kept, would be more."""
NUM_WARM_UPS, NUM_ROUNDS = 3, 6


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def doubling(depth: int) -> dict[str, Any]:
    """Each definition takes the one before it twice, in two ways."""
    definitions: dict[str, Any] = {"d0": {"type": "string"}}
    for index in range(1, depth):
        before = {"$ref": f"#/$defs/d{index - 1}"}
        ways = ({"anyOf": [before, {"type": "object", "properties": {name: before}}]} for name in (f"x{index}", "y"))
        definitions[f"d{index}"] = {"allOf": list(ways)}
    return {"$ref": f"#/$defs/d{depth - 1}", "$defs": definitions}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"structured_outputs": {"json": schema}}


def unlike(fields: dict[str, Any], number: int) -> dict[str, Any]:
    """The same, with a schema of another text."""
    schema = fields.get("structured_outputs", {}).get("json")
    return fields if schema is None else json_schema(schema | {"description": f"round {number}"})


def called(arguments: Any) -> list[Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "a", "content": "1"}
    return [*ASK, {"role": "assistant", "tool_calls": [call]}, answer]


NAMED = {"type": "function", "function": {"name": "g"}}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "deep schema": (json_schema(nested(65)), "structured_outputs"),
    "wide schema": (json_schema({"properties": {f"p{n}": {} for n in range(40_000)}}), "structured_outputs"),
    "long enumeration": (json_schema({"enum": list(range(10**5))}), "structured_outputs"),
    "schema that doubles": (json_schema(doubling(40)), "structured_outputs"),
    "reference to itself": (json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "structured"),
    "nothing allowed": ({"structured_outputs": {"regex": r"[^\s\S]"}}, "structured_outputs"),
    "grammar without end": ({"structured_outputs": {"grammar": 'root ::= "a" root'}}, "structured_outputs"),
    "required without tools": ({"tool_choice": "required"}, "tool_choice"),
    "two tools of one name": ({"tools": [TOOL, TOOL]}, "tools"),
    "a name that is not declared": ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice"),
    "bias out of range": ({"logit_bias": {"65": 101}}, "logit_bias"),
    "bias outside the vocabulary": ({"logit_bias": {"999999": 1}}, "logit_bias"),
    "a billion choices": ({"n": 10**9}, "n"),
    "more least tokens than tokens": ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    "bad words of spaces": ({"bad_words": ["   "]}, "bad_words"),
    "a result without a call": (
        {"messages": [*ASK, {"role": "tool", "tool_call_id": "a", "content": "1"}]},
        "messages",
    ),
    "arguments that are no JSON": ({"messages": called("{")}, "messages"),
    "arguments that are no object": ({"messages": called("[1]")}, "messages"),
    "a continued message of the user": ({"continue_final_message": True}, "continue_final_message"),
}
"""Each with the beginning of the parameter that the error names."""
EXPLODING = {"structured_outputs": {"regex": "((a{1,999}){1,999}){1,999}"}}


@pytest.fixture(scope="module")
def bad_server(check_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """recall-gqa as a model that calls tools as Hermes does."""
    flags = ["--dtype", "float32", "--max-seqs", "4", "--max-model-len", "1024", "--tool-call-parser", "hermes"]
    log = tmp_path_factory.mktemp("server") / "server.log"
    one = start_server(log, check_models / "recall-gqa", *flags)
    assert one.url, one.errors
    yield one
    one.kill()


def post(server: Server, fields: dict[str, Any]) -> httpx.Response:
    """The answer; asked again while an earlier compilation that took too long makes this client busy."""
    body = {"messages": ASK, "temperature": 0, "max_tokens": 8} | fields
    while True:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
        if answer.status_code != 429:
            return answer
        assert int(answer.headers["retry-after"]) >= 1
        time.sleep(0.1)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_a_400_that_names_the_field(bad_server: Server, case: str) -> None:
    fields, param = BAD[case]
    answer = post(bad_server, fields)
    assert answer.status_code == 400, answer.text[:300]
    error = answer.json()["error"]
    assert error["param"].startswith(param), error
    assert len(error["message"]) < 1000, "it does not repeat what was sent"
    assert any(end in error["message"] for end in (";", "at most", "must")), "it says what to do"


def test_a_schema_with_tools_is_refused_by_name(bad_server: Server) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
    answer = post(bad_server, {"tools": [TOOL], "response_format": schema})
    assert answer.status_code == 400, answer.text[:300]
    assert answer.json()["error"]["param"] == "response_format.json_schema.schema"


def test_an_expression_that_would_explode_is_followed_as_far_as_the_answer_goes(bad_server: Server) -> None:
    answer = post(bad_server, EXPLODING)
    assert answer.status_code == 200, answer.text[:300]
    assert set(answer.json()["choices"][0]["message"]["content"]) == {"a"}


def test_refused_requests_leave_no_memory_behind(bad_server: Server) -> None:
    process, sizes = psutil.Process(bad_server.process.pid), []
    asked = [EXPLODING, *(fields for fields, _ in BAD.values())]
    with ThreadPoolExecutor(4) as pool:
        for number in range(NUM_WARM_UPS + NUM_ROUNDS):
            # What is refused is remembered by its text: each round sends its own.
            own = [unlike(fields, number) for fields in asked]
            answers = list(pool.map(lambda fields: post(bad_server, fields).status_code, own))
            assert answers == [200] + [400] * len(BAD)
            sizes.append(process.memory_info().rss)
    num_sent = len(json.dumps(asked))
    assert sizes[-1] - sizes[NUM_WARM_UPS - 1] < MAX_GROWTH + NUM_ROUNDS * num_sent, sizes
    assert post(bad_server, {"messages": [{"role": "user", "content": "copy kilo"}]}).status_code == 200
