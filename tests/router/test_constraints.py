"""What a body constrains its answer to, under each of the names that clients use."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plait.http.constraints import Constraint
from plait.http.errors import ApiError
from plait.http.validate import read_chat, read_completion

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
WRAPPED = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}


def constraint(**fields: Any) -> Constraint | None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields})
    asked = read_chat(body.encode(), ("m",)).constraint
    completion = json.dumps({"prompt": "hi", **fields}).encode()
    assert read_completion(completion, ("m",)).constraint == asked
    return asked


def rejection(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        constraint(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": WRAPPED}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs.json"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, "guided_json"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema"),
    ],
)
def test_a_schema_has_many_names_and_goes_on_as_it_was_written(fields: dict[str, Any], param: str) -> None:
    assert constraint(**fields) == Constraint(param=param, constraint="json_schema", text=json.dumps(SCHEMA))


@pytest.mark.parametrize(
    ("names", "kind"),
    [(["guided_regex", "regex"], "regex"), (["guided_grammar", "ebnf"], "grammar")],
)
def test_older_names_mean_the_same(names: list[str], kind: Any) -> None:
    for name in names:
        assert constraint(**{name: "a+"}) == Constraint(param=name, constraint=kind, text="a+")


def test_structured_outputs_take_each_kind() -> None:
    for name, kind in (("regex", "regex"), ("grammar", "grammar")):
        asked = constraint(structured_outputs={name: "a+", "json": None})
        assert asked is not None
        assert (asked.param, asked.constraint, asked.text) == (f"structured_outputs.{name}", kind, "a+")
    chosen = constraint(structured_outputs={"choice": ["a", "b"]})
    assert chosen is not None
    assert chosen.texts == ["a", "b"] == getattr(constraint(guided_choice=["a", "b"]), "texts", None)
    compact = constraint(structured_outputs={"json": {}, "disable_any_whitespace": True})
    assert compact is not None
    assert compact.is_compact


def test_any_json_object() -> None:
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        asked = constraint(**fields)
        assert asked is not None
        assert asked.constraint == "json_object"


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": {}, "whitespace_pattern": "[ ]?"}},
        {"structured_outputs": {"json_object": True, "whitespace_pattern": "[ ]?"}},
        {"guided_json": {}, "guided_whitespace_pattern": "[ ]?"},
    ],
)
def test_json_has_the_spaces_that_are_asked_for(fields: dict[str, Any]) -> None:
    asked = constraint(**fields)
    assert asked is not None
    assert (asked.constraint, asked.whitespace_pattern) == ("json_schema", "[ ]?")


def test_a_structural_tag_is_read_under_each_name() -> None:
    tag = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
    for fields in (
        {"response_format": {"type": "structural_tag", **tag}},
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **tag})}},
        {"structural_tag": tag},
    ):
        asked = constraint(**fields)
        assert asked is not None
        assert asked.constraint == "structural_tag"
        assert tag.items() <= json.loads(asked.text).items()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": None, "guided_json": None, "regex": None},
        {"guided_decoding_backend": "auto"},
    ],
)
def test_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    assert constraint(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "send the schema"),
        ({"structured_outputs": {}}, "structured_outputs", "none of json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex", "leave one out"),
        ({"guided_regex": "a", "response_format": WRAPPED}, "guided_regex", "leave one out"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
            "structured_outputs.whitespace_pattern",
            "leave one out",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "additionalProperties",
        ),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "leave it out"),
        ({"guided_whitespace_pattern": " ", "guided_regex": "a"}, "guided_whitespace_pattern", "`guided_json`"),
        ({"guided_choice": "a"}, "guided_choice", "a list"),
    ],
)
def test_what_cannot_be_meant_is_named(fields: dict[str, Any], param: str, said: str) -> None:
    error = rejection(**fields)
    assert error.param == param
    assert said in error.message
