"""Answers under a constraint, from the front door: what each kind holds them to, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server, start_server

KILO: list[int] = [256, 260, *b"copy kilo", 261]
"""Answered with `kilo` and the end token 257."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4, "pattern": "^[a-zé]*$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", None, True]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(check_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """recall-gqa."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    one = start_server(log, check_models / "recall-gqa", "--dtype", "float32", "--max-seqs", "8", "--page-size", "16")
    assert one.url, one.errors
    yield one
    one.kill()


def complete(server: Server, **fields: Any) -> list[Any]:
    body = {"prompt": KILO, "temperature": 0, "max_tokens": 200, "return_token_ids": True} | fields
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"])


def rejection(server: Server, **fields: Any) -> Any:
    answer = httpx.post(server.url + "/v1/completions", json={"prompt": "x"} | fields, timeout=60)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) <= {"name", "age", "tags"}
    assert re.fullmatch("[a-zé]{0,4}", person["name"])
    assert 0 <= person["age"] <= 99
    assert all(tag in ("a", None, True) for tag in person.get("tags", []))


@pytest.mark.parametrize("temperature", [0, 1, 100])
def test_an_answer_matches_its_expression_and_ends_there(server: Server, temperature: float) -> None:
    for choice in complete(server, structured_outputs={"regex": "[xyz]{3}(-[0-9]{2}){2}"}, temperature=temperature):
        assert re.fullmatch("[xyz]{3}(-[0-9]{2}){2}", choice["text"])
        assert choice["finish_reason"] == "stop"


def test_every_choice_of_a_request_has_its_own_way(server: Server) -> None:
    choices = complete(server, n=8, temperature=100, guided_choice=["alpha", "beta", "gamma", "al"])
    texts = {choice["text"] for choice in choices}
    assert texts <= {"alpha", "beta", "gamma", "al"}
    assert len(texts) > 1


@pytest.mark.parametrize("temperature", [1, 100])
def test_json_holds_its_schema(server: Server, temperature: float) -> None:
    asked = {"json": SCHEMA, "disable_any_whitespace": True}
    for choice in complete(server, n=6, structured_outputs=asked, temperature=temperature):
        check_person(choice["text"])


def test_a_chat_streams_what_its_format_says(server: Server) -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "switch", "schema": {"enum": ["on", "off", None]}}}
    body = {"messages": [{"role": "user", "content": "?"}], "response_format": wrapped, "temperature": 100}
    answer = httpx.post(server.url + "/v1/chat/completions", json=body | {"stream": True}, timeout=60)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    text = "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)
    assert json.loads(text) in ("on", "off", None)


def test_json_has_the_spaces_that_its_pattern_says(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    asked = {"json": schema, "whitespace_pattern": "[ ]{2}"}
    for choice in complete(server, n=2, structured_outputs=asked, temperature=100):
        assert re.fullmatch(r"\{ {0,2}\"a\" {0,2}: {0,2}(true|false) {0,2}\}", choice["text"]), choice["text"]


def test_the_newer_structural_tag_holds_its_format(server: Server) -> None:
    content = {"type": "regex", "pattern": "[xy]{3}"}
    asked = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}
    for choice in complete(server, response_format=asked, temperature=100):
        assert re.fullmatch("<a>[xy]{3}</a>", choice["text"])
    refused = {"type": "structural_tag", "format": {"type": "sequence", "elements": []}}
    assert "`sequence`" in rejection(server, response_format=refused)["message"]


def test_an_expression_that_the_answer_matches_changes_nothing(server: Server) -> None:
    (free,) = complete(server)
    (held,) = complete(server, guided_regex="[a-z]+")
    assert free["text"] == held["text"] == "kilo"


def test_free_and_held_answers_share_a_batch(server: Server) -> None:
    asked: list[dict[str, Any]] = [{}, {"ebnf": 'root ::= "(" root ")" | [0-9]'}] * 4
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda fields: complete(server, **fields)[0]["text"], asked))
    assert set(answers[::2]) == {"kilo"}
    assert all(re.fullmatch(r"\(*[0-9]\)*", text) and text.count("(") == text.count(")") for text in answers[1::2])


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"guided_json": {"not": {}}}, "guided_json", "`not`"),
        ({"guided_regex": "a" * 9000}, "guided_regex", "8192"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice", "1024"),
        ({"guided_grammar": 'root ::= "a" root'}, "guided_grammar", "never ends"),
        ({"structured_outputs": {"json": {"enum": []}}}, "structured_outputs.json", "allows no answer"),
        ({"regex": "a", "min_tokens": 3}, "min_tokens", "leave one out"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(server: Server, fields: Any, param: str, said: str) -> None:
    error = rejection(server, **fields)
    assert error["param"] == param
    assert said in error["message"]


def test_constraints_are_counted_and_compiled_once(server: Server) -> None:
    before = read_metrics(server.url)
    for _ in range(3):
        complete(server, guided_regex="counted [0-9]")
    after = read_metrics(server.url)

    def more(name: str) -> float:
        return after[name] - before[name]

    assert more('plait_constrained_requests_total{kind="regex"}') == 3
    assert more('plait_grammars_total{result="compiled"}') == 1
    assert more('plait_grammars_total{result="cached"}') == 2
