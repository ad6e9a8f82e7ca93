"""What the front door makes of the bodies of calls that generate nothing."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from plait.http.errors import ApiError
from plait.http.text_calls import (
    Reader,
    count_message,
    read_detokenize,
    read_response_to_count,
    read_tokenize,
)
from plait.http.validate import ANONYMOUS

HELLO = [{"role": "user", "content": "hello"}]


def called(read: Reader, **fields: Any) -> dict[str, Any]:
    asked = msgspec.json.decode(read(json.dumps(fields).encode(), ("tiny",), ANONYMOUS).json)
    assert isinstance(asked, dict)
    return asked


def test_a_text_and_a_chat_are_tokenised_as_their_routes_read_them() -> None:
    text = called(read_tokenize, prompt="once", add_special_tokens=False, return_token_strs=True)
    assert (text["call"], text["kind"], text["prompts"]) == ("tokenize", "completion", ["once"])
    assert (text["add_special_tokens"], text["return_token_strs"]) == (False, True)
    chat = called(read_tokenize, messages=HELLO, add_generation_prompt=False)
    assert (chat["kind"], chat["messages"], chat["add_generation_prompt"]) == ("chat", HELLO, False)
    assert not chat["return_token_strs"]


def test_ids_are_handed_on() -> None:
    assert called(read_detokenize, tokens=[1, 2]) == {"call": "detokenize", "tokens": [1, 2]}


@pytest.mark.parametrize(
    ("read", "fields", "protocol"),
    [(read_response_to_count, {"input": "x"}, "responses"), (count_message, {"messages": HELLO}, "messages")],
)
def test_an_input_is_counted_as_its_route_reads_it(read: Reader, fields: dict[str, Any], protocol: str) -> None:
    asked = called(read, **fields)
    assert (asked["call"], asked["protocol"]["name"]) == ("count_tokens", protocol)


@pytest.mark.parametrize(
    ("read", "fields", "param"),
    [
        (read_tokenize, {}, "prompt"),
        (read_tokenize, {"prompt": ["a"]}, "prompt"),
        (read_tokenize, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (read_detokenize, {}, "tokens"),
        (read_detokenize, {"tokens": ["a"]}, "tokens[0]"),
        (read_detokenize, {"tokens": [], "model": "other"}, "model"),
    ],
)
def test_a_field_that_is_not_allowed_is_named(read: Reader, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        called(read, **fields)
    assert caught.value.param == param
