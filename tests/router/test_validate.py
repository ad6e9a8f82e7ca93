"""What the front door makes of OpenAI's bodies."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plait.http.api import GenerateRequest
from plait.http.bodies import SamplingFields
from plait.http.errors import ApiError
from plait.http.identity import ClientIdentity
from plait.http.unsupported import UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION
from plait.http.validate import read_chat, read_completion
from plait.settings import HttpSettings

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> GenerateRequest:
    return read_chat(json.dumps({"messages": HELLO, **fields}).encode(), ("tiny",))


def completion(**fields: Any) -> GenerateRequest:
    return read_completion(json.dumps({"prompt": "once", **fields}).encode(), ("tiny",))


def rejection(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    return caught.value


def test_a_plain_chat_leaves_every_choice_to_the_model() -> None:
    request = chat(model="tiny")
    assert (request.kind, request.model, request.stream, request.include_usage) == ("chat", "tiny", False, False)
    assert request.messages == [{"role": "user", "content": "hello"}]
    assert request.id.startswith("chatcmpl-")
    assert request.sampling == SamplingFields()
    assert (request.max_tokens, request.seed) == (None, None)
    assert request.logprobs is None
    assert request.prompt_logprobs is None


def test_two_requests_have_two_ids() -> None:
    assert chat().id != chat().id


def test_null_means_not_given_for_every_field() -> None:
    names = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens", "stop", "stream"]
    names += ["stop_token_ids", "ignore_eos", "logprobs", "top_logprobs", "stream_options", "model", "n", "tools"]
    request = chat(**dict.fromkeys(names))
    assert msgspec.structs.replace(request, id="", created=0) == msgspec.structs.replace(chat(), id="", created=0)


def test_sampling_fields_arrive_as_they_were_sent() -> None:
    request = chat(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.05, seed=7, stop="x", stop_token_ids=[3], ignore_eos=True
    )
    assert request.sampling == SamplingFields(temperature=0.5, top_p=0.9, top_k=40, min_p=0.05)
    assert (request.seed, request.stop, request.stop_token_ids, request.ignore_eos) == (7, ["x"], [3], True)


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1])
def test_a_seed_has_64_bits_and_a_sign(seed: int) -> None:
    assert chat(seed=seed).seed == seed


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=3).max_tokens == 3


def test_errors_name_the_field_that_the_client_used() -> None:
    assert chat(max_tokens=5).max_tokens_field == "max_tokens"
    assert chat(max_completion_tokens=3).max_tokens_field == "max_completion_tokens"


def test_chat_logprobs_are_a_switch_and_a_number_beside_it() -> None:
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).logprobs == 5
    assert chat(logprobs=False).logprobs is None
    assert rejection(top_logprobs=5).param == "top_logprobs"


def test_completion_logprobs_are_a_number() -> None:
    assert completion(logprobs=0).logprobs == 0
    with pytest.raises(ApiError, match="logprobs"):
        completion(logprobs=True)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0]["content"] == "a\nb"


def test_a_developer_speaks_as_the_system() -> None:
    assert chat(messages=[{"role": "developer", "content": "be brief"}]).messages[0]["role"] == "system"


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_tools_have_two_names() -> None:
    request = chat(tools=[LOOK], parallel_tool_calls=False)
    assert (request.tools, request.single_call, request.are_functions) == ([LOOK], True, False)
    older = chat(functions=[LOOK["function"]], function_call="none")
    assert (older.tools, older.tool_choice.mode, older.are_functions) == ([LOOK], "none", True)


def test_some_of_the_tools_may_be_allowed() -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]}
    request = chat(tools=[LOOK], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert (request.tool_choice.mode, request.tool_choice.names) == ("required", ["look"])


@pytest.mark.parametrize(
    ("fields", "mode", "names"),
    [
        ({"tools": [LOOK], "tool_choice": "required"}, "required", None),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "look"}}}, "named", ["look"]),
        ({"functions": [LOOK["function"]], "function_call": {"name": "look"}}, "named", ["look"]),
    ],
)
def test_a_call_may_be_asked_for(fields: dict[str, Any], mode: str, names: list[str] | None) -> None:
    asked = chat(**fields).tool_choice
    assert (asked.mode, asked.names) == (mode, names)


def test_calls_and_results_have_older_names_too() -> None:
    call = {"name": "look", "arguments": "{}"}
    messages = [*HELLO, {"role": "assistant", "function_call": call}, {"role": "function", "content": "x"}]
    _, called, answered = chat(messages=messages).messages
    assert called["tool_calls"] == [{"type": "function", "function": call}]
    assert answered["role"] == "tool"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [LOOK], "function_call": {"name": "look"}}, "function_call"),
        ({"functions": [LOOK["function"]], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [LOOK], "functions": [LOOK["function"]]}, "functions"),
        ({"tools": [LOOK], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": [LOOK], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": "look"}, "tools"),
        ({"include_reasoning": "no"}, "include_reasoning"),
        ({"documents": ["text"]}, "documents[0]"),
    ],
)
def test_tools_that_cannot_be_read_are_named(fields: dict[str, Any], param: str) -> None:
    assert rejection(**fields).param == param


def test_an_assistant_that_called_tools_needs_no_content() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    answered = {"role": "tool", "content": "42", "tool_call_id": "1"}
    request = chat(messages=[*HELLO, {"role": "assistant", "tool_calls": calls}, answered])
    assert request.messages[1] == {"role": "assistant", "content": "", "tool_calls": calls}
    assert request.messages[2] == answered


@pytest.mark.parametrize(
    ("prompt", "meant"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_a_prompt_has_openais_four_forms(prompt: Any, meant: Any) -> None:
    assert completion(prompt=prompt).prompts == meant


@pytest.mark.parametrize("prompt", [[1, "a"], [1.5], None, {"a": 1}, [2**63], [[-(2**64)]], [[True]]])
def test_other_prompts_are_rejected(prompt: Any) -> None:
    with pytest.raises(ApiError) as caught:
        completion(prompt=prompt)
    assert caught.value.status == 400
    assert "prompt" in (caught.value.param or "")


def test_usage_is_asked_for_through_stream_options() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage
    assert rejection(stream_options={"include_usage": True}).param == "stream_options"


def test_prompt_logprobs_are_a_number() -> None:
    assert chat(prompt_logprobs=2).prompt_logprobs == 2


def test_another_model_is_not_found_and_the_served_one_is_named() -> None:
    error = rejection(model="gpt-4")
    assert (error.status, error.code) == (404, "model_not_found")
    assert "'gpt-4'" in error.message
    assert "'tiny'" in error.message


BAD_VALUES: dict[str, list[Any]] = {
    "temperature": ["1", True, [], {}],
    "top_p": ["x", False],
    "min_p": ["x", []],
    "top_k": [1.5, "1", 2**63],
    "seed": [2**63, 1.5, "1", 10**30],
    "max_tokens": [1.5, "9", 2**64, True],
    "max_completion_tokens": [1.5, "9"],
    "stop": [1, [1]],
    "stop_token_ids": [1, [2**63], ["x"]],
    "logprobs": [1, "true"],
    "top_logprobs": [1.5, True],
    "prompt_logprobs": ["1", 1.5],
    "n": ["4", 1.5, True, 10**400],
    "priority": [1.5, 10**4000],
    "user": ["u" * 1025],
    "cache_salt": ["", "s" * 1025],
    "stream": [1, "true"],
    "ignore_eos": [1],
    "skip_special_tokens": [1],
    "presence_penalty": ["1", True],
    "repetition_penalty": [[1]],
    "min_tokens": ["1", 1.5],
    "logit_bias": [[1], 5, {"1": "2"}],
    "allowed_token_ids": [1, ["x"], [2**63]],
    "bad_words": ["x", [1]],
    "truncate_prompt_tokens": ["9", 1.5, True],
    "truncation_side": ["middle", 1],
    "reasoning_effort": ["much", 1],
    "continue_final_message": ["true"],
    "stream_options": [True],
    "chat_template_kwargs": [[1]],
    "messages": ["hello", None, [1]],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in BAD_VALUES.items() for value in values],
    ids=lambda value: str(value)[:24],
)
def test_a_value_of_the_wrong_type_is_a_400_that_names_the_field(field: str, value: Any) -> None:
    error = rejection(**({"logprobs": True} if field == "top_logprobs" else {}), **{field: value})
    assert error.status == 400
    assert error.code == "invalid_value"
    assert (error.param or "").startswith(field)
    assert re.match(rf"`{field}[^`]*` is .*(allowed|missing); (send|leave)", error.message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "3"}, '`temperature` is "3", where a number is allowed; send that or leave it out'),
        ({"stop": ["a", 1]}, "`stop[1]` is 1, where a text is allowed; send that"),
        ({"stop_token_ids": [3, "x"]}, '`stop_token_ids[1]` is "x", where a whole number is allowed; send that'),
        (
            {"top_k": 2**63},
            "`top_k` is 9223372036854775808, where numbers of at most 64 bits are allowed; send a smaller one or "
            "leave it out",
        ),
        ({"messages": [{"content": "x"}]}, "`messages[0].role` is missing; send it"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            '`messages[0].role` is "robot", where one of system, developer, user, assistant, tool, function is '
            "allowed; send one of these",
        ),
        (
            {"cache_salt": ""},
            '`cache_salt` is "", where a text of 1 or more characters is allowed; send that or leave it out',
        ),
        ({"model": "other"}, "`model` is 'other', where this server serves 'tiny'; send that or leave it out"),
    ],
)
def test_an_error_says_what_was_given_what_is_allowed_and_what_to_do(fields: dict[str, Any], message: str) -> None:
    assert rejection(**fields).message == message


@pytest.mark.parametrize("digits", ["18446744073709551616", "-9223372036854775809", "1" * 400, "1" * 5000], ids=len)
@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ('"messages": [], "chat_template_kwargs": {"a": [1, NUMBER]}', "chat_template_kwargs.a"),
        ('"messages": [{"role": "assistant", "tool_calls": [{"a": NUMBER}]}]', "messages[0].tool_calls"),
    ],
)
def test_a_number_that_the_engine_cannot_read_is_rejected_where_it_is(fields: str, where: str, digits: str) -> None:
    with pytest.raises(
        ApiError, match=r"\d, where numbers of at most 64 bits are allowed; send|\d\.\.\., where"
    ) as caught:
        read_chat(f"{{{fields.replace('NUMBER', digits)}}}".encode(), ("tiny",))
    assert (caught.value.param or "").startswith(where)


def test_a_large_float_is_found_in_what_the_client_wrote() -> None:
    body = b'{"messages": [], "chat_template_kwargs": {"a": 1, "b": {"c": [2, 1e999]}}}'
    with pytest.raises(ApiError) as caught:
        read_chat(body, ("tiny",))
    assert caught.value.param == "chat_template_kwargs.b.c[1]"
    assert "is 1e999," in caught.value.message


BAD_MESSAGES: list[Any] = [
    {"content": "no role"},
    {"role": "robot", "content": "x"},
    {"role": "user"},
    {"role": "user", "content": 5},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
    {"role": "user", "content": [{"type": "text"}]},
    {"role": "user", "content": [{"text": "x"}]},
    {"role": "user", "content": ["x"]},
]


@pytest.mark.parametrize("message", BAD_MESSAGES, ids=str)
def test_a_broken_message_is_a_400_that_says_where(message: Any) -> None:
    error = rejection(messages=[*HELLO, message])
    assert error.status == 400
    assert "messages[1]" in error.message or "messages[...]" in error.message


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_CHAT))
def test_an_unsupported_field_is_rejected_by_name(name: str) -> None:
    error = rejection(**{name: {"some": "thing"}})
    assert (error.status, error.param, error.code) == (400, name, "unsupported_value")
    assert f"`{name}`" in error.message


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_CHAT))
def test_an_unsupported_field_is_accepted_at_its_neutral_values(name: str) -> None:
    for value in (None, *UNSUPPORTED_CHAT[name]):
        chat(**{name: value})


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_COMPLETION))
def test_the_same_holds_for_completions(name: str) -> None:
    for value in (None, *UNSUPPORTED_COMPLETION[name]):
        completion(**{name: value})
    with pytest.raises(ApiError, match=f"`{name}`"):
        completion(**{name: {"some": "thing"}})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("best_of", True),
        ("best_of", 0),
        ("use_beam_search", True),
        ("length_penalty", 0.1),
    ],
)
def test_nearly_neutral_values_are_rejected(name: str, value: Any) -> None:
    assert rejection(**{name: value}).param == name


def test_a_number_too_large_for_an_unsupported_field_is_rejected_by_name() -> None:
    assert rejection(best_of=10**400).param == "best_of"


def test_unknown_names_are_ignored() -> None:
    chat(user="me", metadata={"a": "b"}, safety_identifier="x", prompt_cache_key="y", frobnicate=[1, 2], store=None)


@pytest.mark.parametrize("tier", ["auto", "flex", "priority", 7])
def test_fields_that_change_no_answer_are_taken_at_any_value(tier: object) -> None:
    chat(service_tier=tier, store=True)
    completion(service_tier=tier)


def test_streams_may_ask_for_the_usage_so_far() -> None:
    assert chat(stream=True, stream_options={"continuous_usage_stats": True}).continuous_usage_stats
    assert not chat(stream=True, stream_options={"include_usage": True}).continuous_usage_stats


def test_a_continued_message_is_followed_by_no_generation_prompt() -> None:
    assert chat().add_generation_prompt
    assert not chat(continue_final_message=True).add_generation_prompt
    error = rejection(continue_final_message=True, add_generation_prompt=True)
    assert error.param == "continue_final_message"
    assert error.message.endswith("leave one out")


def test_the_reasoning_of_earlier_answers_is_read_under_both_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        thought: Any = {"role": "assistant", "content": "4", name: "2 + 2"}
        assert chat(messages=[*HELLO, thought]).messages[1] == thought


def test_words_that_a_field_does_not_take_are_listed() -> None:
    message = rejection(reasoning_effort="much").message
    assert message == (
        '`reasoning_effort` is "much", where one of none, minimal, low, medium, high, xhigh, max is allowed; '
        "send one of these"
    )


def test_template_arguments_pass() -> None:
    assert chat(chat_template_kwargs={"enable_thinking": False}).chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'{"messages": NaN}',
        b'{"model": "\xff"}',
        b'{"messages": "\\ud800"}',
        b"{} x",
    ],
)
def test_a_body_that_is_no_json_object_is_a_400(raw: bytes) -> None:
    with pytest.raises(ApiError, match="JSON") as caught:
        read_chat(raw, ("tiny",))
    assert caught.value.status == 400


def test_malformed_json_is_located() -> None:
    with pytest.raises(ApiError, match=r"byte 14"):
        read_chat(b'{"messages": [}', ("tiny",))


@pytest.mark.parametrize("where", ["messages", "frobnicate", "chat_template_kwargs", "tools"])
@pytest.mark.parametrize("bracket", ["[", '{"a":'])
def test_deep_nesting_is_a_400_and_does_not_exhaust_the_stack(where: str, bracket: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_chat(f'{{"{where}": {bracket * 100_000}'.encode(), ("tiny",))
    assert caught.value.status == 400


def test_free_form_values_are_bounded_in_depth() -> None:
    value: Any = 1
    for _ in range(17):
        value = [value]
    assert rejection(chat_template_kwargs={"x": value}).param == "chat_template_kwargs.x"
    calls = [{"function": value}]
    assert "nested" in rejection(messages=[*HELLO, {"role": "assistant", "tool_calls": calls}]).message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [*UNSUPPORTED_CHAT, *(field.name for field in msgspec.structs.fields(GenerateRequest)), "prompt"]
)


@settings(max_examples=300, deadline=None)
@given(fields=st.dictionaries(NAMES, JSON, max_size=6))
def test_whatever_json_comes_it_is_a_request_or_an_error_for_the_client(fields: dict[str, Any]) -> None:
    raw = json.dumps({"messages": HELLO, "prompt": "x"} | fields).encode()
    for reader in (read_chat, read_completion):
        try:
            request = reader(raw, ("tiny",))
        except ApiError as error:
            status = error.status
        else:
            status = 200
            assert msgspec.json.decode(msgspec.json.encode(request), type=GenerateRequest) == request
        assert status in (200, 400, 404)


def test_numbers_out_of_range_go_to_the_engine_which_knows_the_ranges() -> None:
    request = chat(priority=-5, max_tokens=-1, top_k=2**40, logprobs=True, top_logprobs=2**32, stop_token_ids=[2**32])
    assert (request.priority, request.max_tokens, request.sampling.top_k) == (-5, -1, 2**40)
    assert (request.logprobs, request.stop_token_ids) == (2**32, [2**32])
    assert chat().priority == 0
    assert completion(prompt=[-1, 2**32]).prompts == [[-1, 2**32]]


def asked(api_key: bytes | None, http: HttpSettings, **fields: object) -> GenerateRequest:
    body = json.dumps({"messages": HELLO, **fields}).encode()
    return read_chat(body, ("tiny",), ClientIdentity(api_key, http))


def test_tenants_are_keys_and_salts_are_keys_and_cache_salts() -> None:
    http = HttpSettings()
    nobody, ada, bob = asked(None, http), asked(None, http, user="ada"), asked(None, http, user="bob")
    assert {nobody.tenant, ada.tenant, bob.tenant} == {0}, "a client may write any `user`"
    assert (nobody.salt, ada.salt) == (0, 0)
    one, other = asked(b"key-1", http, user="ada"), asked(b"key-2", http, user="ada")
    assert one.tenant == asked(b"key-1", http, user="bob").tenant, "the key says whose share it is"
    assert one.tenant != other.tenant
    assert one.salt != other.salt
    assert asked(None, http, cache_salt="s").salt != asked(None, http, cache_salt="t").salt != 0


def test_tenants_are_users_where_a_trusted_gateway_names_them() -> None:
    http = HttpSettings(trust_user_field=True)
    nobody, ada, bob = asked(None, http), asked(None, http, user="ada"), asked(None, http, user="bob")
    assert len({nobody.tenant, ada.tenant, bob.tenant}) == 3
    assert ada.tenant == asked(None, http, user="ada").tenant
    assert ada.salt == bob.salt == 0, "users of one server share cached pages"
    gateway, other = asked(b"key-1", http, user="ada"), asked(b"key-2", http, user="ada")
    assert len({gateway.tenant, other.tenant, asked(b"key-1", http, user="bob").tenant, ada.tenant}) == 4
    assert asked(b"key-1", http).tenant == asked(b"key-1", http).tenant != gateway.tenant


def test_cached_tokens_are_told_if_the_operator_allows_it_or_the_salt_is_the_clients_own() -> None:
    quiet, open_ = HttpSettings(), HttpSettings(enable_prompt_tokens_details=True)
    assert not asked(None, quiet).prompt_tokens_details
    assert not asked(b"key", quiet).prompt_tokens_details, "many users may share a key"
    assert asked(b"key", quiet, cache_salt="s").prompt_tokens_details
    assert asked(None, open_).prompt_tokens_details
