"""A body may have so many objects and lists; what looks like one within a text is none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plait.http.body_reader import MAX_CONTAINERS
from plait.http.errors import ApiError
from plait.http.validate import read_completion

SERVED = ("tiny",)
TEXTS = st.text(alphabet='{["\\a,:]}\n', max_size=6)
HARMLESS = st.recursive(TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=20)


def completion(**fields: object) -> bytes:
    return json.dumps({"prompt": "a"} | fields).encode()


def test_a_body_of_too_many_lists_is_refused_before_it_is_read() -> None:
    at_the_limit: list[object] = [[]] * (MAX_CONTAINERS - 2)
    assert read_completion(completion(unknown=at_the_limit), SERVED).prompts == ["a"]
    with pytest.raises(ApiError, match="objects and lists, which is the limit") as refused:
        read_completion(completion(unknown=[*at_the_limit, {}]), SERVED)
    assert refused.value.status == 400


@given(HARMLESS)
def test_openings_within_texts_do_not_count(value: object) -> None:
    openings = "{[" * MAX_CONTAINERS
    assert read_completion(completion(unknown=[openings, value, openings]), SERVED).prompts == ["a"]
