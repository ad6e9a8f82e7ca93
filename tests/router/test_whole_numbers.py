"""A whole number may come as JSON Schema has it, 3.0, in each field that takes one; nothing else changes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import inspect
from plait.http.admin_bodies import ProfileBody
from plait.http.bodies import ChatBody, CompletionBody
from plait.http.embeddings import EmbeddingsBody
from plait.http.messages_body import CountTokensBody, MessagesBody
from plait.http.responses_body import ResponsesBody
from plait.http.text_calls import DetokenizeBody, TokenizeBody
from plait.http.whole_numbers import decode_struct

BODIES: dict[type[msgspec.Struct], dict[str, Any]] = {
    ChatBody: {"messages": []},
    CompletionBody: {"prompt": "a"},
    EmbeddingsBody: {"input": "a"},
    MessagesBody: {"messages": [], "max_tokens": 1},
    CountTokensBody: {"messages": []},
    ResponsesBody: {"input": "a"},
    TokenizeBody: {},
    DetokenizeBody: {"tokens": []},
    ProfileBody: {},
}
"""All that are read, with what they must have."""


def written(kind: inspect.Type, number: object) -> list[object]:
    """Values of a type that have `number` where an integer may be."""
    if isinstance(kind, inspect.UnionType):
        return [value for option in kind.types for value in written(option, number)]
    if isinstance(kind, inspect.ListType):
        return [[value] for value in written(kind.item_type, number)]
    if isinstance(kind, inspect.StructType):
        return [
            {other.encode_name: "a" for other in kind.fields if other.required} | {field.encode_name: value}
            for field in kind.fields
            for value in written(field.type, number)
        ]
    return [number] if isinstance(kind, inspect.IntType) else []


def cases(number: object) -> list[tuple[type[msgspec.Struct], dict[str, Any]]]:
    """A body for each place of a whole number in each body."""
    return [
        (body, least | {field.encode_name: value})
        for body, least in BODIES.items()
        for field in msgspec_fields(body)
        for value in written(field.type, number)
    ]


def msgspec_fields(body: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    told = inspect.type_info(body)
    assert isinstance(told, inspect.StructType)
    return told.fields


@pytest.mark.parametrize("number", ["3.0", "3.000", "3e0", "0.3e1"])
def test_every_whole_number_may_have_a_point(number: str) -> None:
    marked = cases(777_777)
    assert len(marked) > 40
    for kind, body in marked:
        text = msgspec.json.encode(body)
        plain, pointed = (text.replace(b"777777", one) for one in (b"3", number.encode()))
        assert decode_struct(pointed, kind) == msgspec.json.decode(plain, type=kind), text


@pytest.mark.parametrize("number", [3.5, "3", "3.0", True, 1e30])
def test_what_is_no_whole_number_is_none(number: object) -> None:
    refused = [(kind, body) for kind, body in cases(number) if not is_taken(kind, body)]
    texts = {"prompt", "input"}  # they may be texts
    expected = [case for case in cases(number) if not (isinstance(number, str) and texts & set(case[1]))]
    assert [case for case in expected if case not in refused] == []


def is_taken(kind: type[msgspec.Struct], body: dict[str, Any]) -> bool:
    try:
        decode_struct(msgspec.json.encode(body), kind)
    except msgspec.ValidationError:
        return False
    return True


def test_numbers_of_any_other_place_stay_as_they_were_written() -> None:
    free = b'{"a": 3.0, "b": [1e2, 18446744073709551615, 0.1000000000000000055]}'
    body = b'{"prompt": [5.0, 6], "guided_json": %b, "logit_bias": {"5": 3.0}, "n": 2.0}' % free
    read = decode_struct(body, CompletionBody)
    assert (bytes(read.guided_json), read.prompt, read.n, read.logit_bias) == (free, [5, 6], 2, {"5": 3.0})
    chat = decode_struct(b'{"messages": [], "chat_template_kwargs": {"a": 3.0}, "n": 2.0}', ChatBody)
    assert str(chat.chat_template_kwargs) == "{'a': 3.0}"


@pytest.mark.parametrize(
    ("tokens", "named"), [("[5.0, -6.00, 6.5]", "$.tokens[2]"), ("[5.0, null]", "$.tokens[1]"), ("[1.0, 1e30]", "[1]")]
)
def test_an_error_names_the_number_that_is_not_whole(tokens: str, named: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        decode_struct(b'{"tokens": %b}' % tokens.encode(), DetokenizeBody)
    assert named in str(refused.value)
