"""From a request's bytes to a `GenerateRequest`, or to an error that names the field."""

from __future__ import annotations

import os
import time
from typing import Literal

import msgspec

from plait.http.api import GenerateRequest
from plait.http.bodies import (
    ChatBody,
    CompletionBody,
    ContentPart,
    Json,
    Message,
    ResponseFields,
    SamplingFields,
    StreamOptions,
)
from plait.http.body_errors import UNSUPPORTED, field_error
from plait.http.body_reader import MAX_SCHEMA_DEPTH, ServedNames, check_free_form, decode, served_name
from plait.http.constraints import constraint_of
from plait.http.engine_limits import DOCUMENTS, MESSAGES, TOOLS, Range
from plait.http.identity import ClientIdentity
from plait.http.tools import AskedTools, calls_of, read_tools
from plait.http.unsupported import UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION

ANONYMOUS = ClientIdentity()
_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}
"""Roles that open models' templates do not know: OpenAI's newer name for instructions, its older one for results."""


# budget: one field per field of the API that the routes say differently
class _Asked(msgspec.Struct, kw_only=True):
    """What the two routes say in different ways."""

    kind: Literal["chat", "completion"]
    id_prefix: str
    max_tokens: int | None
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    logprobs: int | None
    messages: list[dict[str, Json]] = []
    chat_template_kwargs: dict[str, Json] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    documents: list[dict[str, Json]] = []
    tools: AskedTools = AskedTools()
    include_reasoning: bool = True
    echo: bool = False
    prompts: list[str | list[int]] = []


def read_chat(raw: bytes, served: ServedNames, client: ClientIdentity = ANONYMOUS) -> GenerateRequest:
    """The request in the body of `POST /v1/chat/completions`; raises `ApiError`."""
    body = decode(raw, ChatBody, UNSUPPORTED_CHAT)
    if body.top_logprobs and not body.logprobs:
        raise field_error("top_logprobs", f"is {body.top_logprobs} without `logprobs`; send `logprobs`: true with it")
    check_count("messages", len(body.messages), MESSAGES)
    asked = _Asked(
        kind="chat",
        id_prefix="chatcmpl",
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        max_tokens_field="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        messages=[_message(index, message) for index, message in enumerate(body.messages)],
        chat_template_kwargs=_template_arguments(body.chat_template_kwargs or {}),
        add_generation_prompt=_adds_generation_prompt(body),
        continue_final_message=bool(body.continue_final_message),
        reasoning_effort=body.reasoning_effort,
        thinking_token_budget=body.thinking_token_budget,
        documents=free_form("documents", body.documents or [], DOCUMENTS),
        tools=_tools(body),
        include_reasoning=body.include_reasoning is not False,
    )
    return _request(asked, body, served, client)


def read_completion(raw: bytes, served: ServedNames, client: ClientIdentity = ANONYMOUS) -> GenerateRequest:
    """The request in the body of `POST /v1/completions`; raises `ApiError`."""
    body = decode(raw, CompletionBody, UNSUPPORTED_COMPLETION)
    asked = _Asked(
        kind="completion",
        id_prefix="cmpl",
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompts=prompts_of("prompt", body.prompt),
        echo=bool(body.echo),
    )
    return _request(asked, body, served, client)


def _request(asked: _Asked, body: ResponseFields, served: ServedNames, client: ClientIdentity) -> GenerateRequest:
    model = served_name(body.model, served)
    stream = bool(body.stream)
    check_stream(stream, body.stream_options)
    return GenerateRequest(
        kind=asked.kind,
        id=f"{asked.id_prefix}-{os.urandom(12).hex()}",
        created=int(time.time()),
        model=model,
        stream=stream,
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        continuous_usage_stats=body.stream_options is not None and bool(body.stream_options.continuous_usage_stats),
        prompt_tokens_details=client.reads_cached_tokens(body.cache_salt),
        messages=asked.messages,
        chat_template_kwargs=asked.chat_template_kwargs,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        reasoning_effort=asked.reasoning_effort,
        thinking_token_budget=asked.thinking_token_budget,
        documents=asked.documents,
        tools=asked.tools.tools,
        tool_choice=asked.tools.tool_choice,
        single_call=asked.tools.single_call,
        are_functions=asked.tools.are_functions,
        include_reasoning=asked.include_reasoning,
        prompts=asked.prompts,
        n=body.n,
        echo=asked.echo,
        add_special_tokens=body.add_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        max_tokens=asked.max_tokens,
        max_tokens_field=asked.max_tokens_field,
        sampling=sampling_of(body),
        seed=body.seed,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or [],
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens,
        logit_bias=body.logit_bias or {},
        allowed_token_ids=body.allowed_token_ids,
        bad_words=body.bad_words or [],
        logprob_token_ids=body.logprob_token_ids or [],
        constraint=constraint_of(body),
        logprobs=0 if asked.logprobs is None and body.logprob_token_ids else asked.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=bool(body.return_token_ids),
        return_tokens_as_token_ids=bool(body.return_tokens_as_token_ids),
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        priority=body.priority or 0,
        tenant=client.tenant(body.user),
        salt=client.salt(body.cache_salt),
    )


def sampling_of(body: SamplingFields) -> SamplingFields:
    """The body's sampling fields, whichever they are."""
    return SamplingFields(**{name: getattr(body, name) for name in SamplingFields.__struct_fields__})


def check_stream(stream: bool, options: StreamOptions | None) -> None:
    """Raise `ApiError` for options without a stream, or ones that this server lacks."""
    if options is not None and not stream:
        raise field_error("stream_options", "is only for streams; send `stream`: true with it, or leave it out")
    if options is not None and options.include_obfuscation:
        problem = "is true: this server does not have it; leave it out"
        raise field_error("stream_options.include_obfuscation", problem, code=UNSUPPORTED)


def _adds_generation_prompt(body: ChatBody) -> bool:
    """Unless the last message is continued."""
    if body.continue_final_message and body.add_generation_prompt:
        problem = "is true beside `add_generation_prompt`: true, where one of them is allowed; leave one out"
        raise field_error("continue_final_message", problem)
    return body.add_generation_prompt is not False and not body.continue_final_message


def _tools(body: ChatBody) -> AskedTools:
    asked = read_tools(body)
    free_form("functions" if asked.are_functions else "tools", asked.tools)
    return asked


def free_form(param: str, values: list[dict[str, Json]], most: Range = TOOLS) -> list[dict[str, Json]]:
    """Tools or documents that the engine reads; raises `ApiError`."""
    check_count(param, len(values), most)
    for index, value in enumerate(values):
        check_free_form(f"{param}[{index}]", value, MAX_SCHEMA_DEPTH)
    return values


def check_count(param: str, given: int, allowed: Range) -> None:
    """Raise `ApiError` for too many. The engine would, too; each entry costs time before."""
    if given > allowed.most:
        problem = f"has {given} entries, where {allowed.least} to {allowed.most} are allowed; send fewer"
        raise field_error(param, problem)


def _message(index: int, message: Message) -> dict[str, Json]:
    """The message as templates want it: text content, and only the fields that were given."""
    rendered: dict[str, Json] = {
        "role": _TEMPLATE_ROLES.get(message.role, message.role),
        "content": _text(f"messages[{index}].content", message),
    }
    if calls := calls_of(message):
        check_free_form(f"messages[{index}].tool_calls", calls)
        rendered["tool_calls"] = [*calls]
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if (value := getattr(message, name)) is not None:
            rendered[name] = value
    return rendered


def _text(param: str, message: Message) -> str:
    if message.content is None:
        if message.role != "assistant":
            raise field_error(param, f"is missing; send a text with each {message.role} message")
        return ""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(_check_text_part(f"{param}[{index}]", part) for index, part in enumerate(message.content))


def _check_text_part(param: str, part: ContentPart) -> str:
    if part.type != "text":
        raise field_error(
            f"{param}.type",
            f"is {part.type[:64]!r}: this server reads text only; send parts of type 'text'",
            code=UNSUPPORTED,
        )
    if part.text is None:
        raise field_error(f"{param}.text", "is missing; send it with each part of type 'text'")
    return part.text


def _template_arguments(arguments: dict[str, Json]) -> dict[str, Json]:
    for name, value in arguments.items():
        check_free_form(f"chat_template_kwargs.{name}", value)
    return arguments


def prompts_of(param: str, prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """OpenAI's four forms as a list of prompts, each a text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    if ids and len(ids) == len(prompt):
        return [ids]
    if ids:
        raise field_error(
            param, "mixes token ids with other prompts; send a list of ids, or a list of texts or id lists"
        )
    return [item for item in prompt if not isinstance(item, int)]
