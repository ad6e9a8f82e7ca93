"""From the body of `POST /v1/responses` to a chat whose answer is a response."""

from __future__ import annotations

import os
import time

import msgspec

from plait.http.api import AnswerProtocol, GenerateRequest
from plait.http.bodies import Json
from plait.http.body_errors import INVALID, UNSUPPORTED, field_error
from plait.http.body_reader import ServedNames, decode, given, served_name
from plait.http.constraints import Constraint, schema_constraint
from plait.http.conversation import Conversation
from plait.http.errors import ApiError
from plait.http.function_tools import function_tools
from plait.http.identity import ClientIdentity
from plait.http.responses_body import (
    UNSUPPORTED_RESPONSES,
    InputItem,
    ItemPart,
    ReasoningSettings,
    ResponsesBody,
    ResponsesTool,
    ResponsesToolChoice,
    TextFormat,
    TextSettings,
)
from plait.http.tools import AskedChoice
from plait.http.validate import ANONYMOUS, check_stream, sampling_of

MAX_ITEMS = 16_384
"""Of one input; they become 4,096 messages at most."""
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def read_response(raw: bytes, served: ServedNames, client: ClientIdentity = ANONYMOUS) -> GenerateRequest:
    """The request in the body of `POST /v1/responses`; raises `ApiError`."""
    body = decode(raw, ResponsesBody, UNSUPPORTED_RESPONSES)
    model, stream = served_name(body.model, served), bool(body.stream)
    check_stream(stream, body.stream_options)
    _check_include(body.include or [])
    constraint = _constraint(body.text)
    return GenerateRequest(
        kind="chat",
        id=f"resp_{os.urandom(16).hex()}",
        created=int(time.time()),
        model=model,
        stream=stream,
        include_usage=False,
        prompt_tokens_details=client.reads_cached_tokens(body.cache_salt),
        messages=_messages(body),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        tools=function_tools(body.tools or [], ("function",), "send tools of type 'function'"),
        tool_choice=_tool_choice(body.tool_choice),
        single_call=body.parallel_tool_calls is False,
        protocol=AnswerProtocol(name="responses", fields=_repeated(body, model)),
        max_tokens=body.max_output_tokens,
        sampling=sampling_of(body),
        seed=body.seed,
        constraint=constraint,
        priority=body.priority or 0,
        tenant=client.tenant(body.user),
        salt=client.salt(body.cache_salt),
    )


def _check_include(include: list[str]) -> None:
    """Encrypted thoughts are left empty: they are shown as they are."""
    for index, name in enumerate(include):
        if name != "reasoning.encrypted_content":
            problem = f"is {name[:64]!r}: this server does not have it; 'reasoning.encrypted_content' is allowed"
            raise field_error(f"include[{index}]", problem, UNSUPPORTED)


def _messages(body: ResponsesBody) -> list[dict[str, Json]]:
    conversation = Conversation()
    if body.instructions:
        conversation.instruct(body.instructions)
    if isinstance(body.input, str):
        conversation.ask(body.input)
        return conversation.messages()
    if len(body.input) > MAX_ITEMS:
        raise field_error("input", f"has {len(body.input)} items, where {MAX_ITEMS} are allowed; send the latest ones")
    for index, item in enumerate(body.input):
        _add_item(f"input[{index}]", item, conversation)
    return conversation.messages()


def _add_item(param: str, item: InputItem, conversation: Conversation) -> None:
    match item.type:
        case None | "message":
            _add_message(param, item, conversation)
        case "reasoning":
            text = _text(f"{param}.content", item.content or []) or _text(f"{param}.summary", item.summary or [])
            if text:
                conversation.think(text)
        case "function_call":
            call_id, name = given(param, "call_id", item.call_id), given(param, "name", item.name)
            conversation.call(call_id, name, _arguments(f"{param}.arguments", item.arguments or ""))
        case "function_call_output":
            call_id = given(param, "call_id", item.call_id)
            if not conversation.answers_call(call_id):
                problem = f"is {call_id[:64]!r}, which no function_call right before has; send the call too"
                raise field_error(f"{param}.call_id", problem)
            conversation.result(call_id, _text(f"{param}.output", item.output))
        case other:
            allowed = "'message', 'reasoning', 'function_call' and 'function_call_output' are allowed"
            problem = f"is {other[:64]!r}: this server keeps nothing and has no tools of its own; {allowed}"
            raise field_error(f"{param}.type", problem, UNSUPPORTED)


def _add_message(param: str, item: InputItem, conversation: Conversation) -> None:
    text = _text(f"{param}.content", item.content)
    match item.role:
        case "user":
            conversation.ask(text)
        case "assistant":
            conversation.say(text)
        case "system" | "developer":
            conversation.instruct(text)
        case role:
            shown = "missing" if role is None else repr(role[:64])
            problem = f"is {shown}, where 'user', 'assistant', 'system' and 'developer' are allowed; send one of these"
            raise field_error(f"{param}.role", problem)


def _text(param: str, content: str | list[ItemPart] | None) -> str:
    if content is None:
        raise field_error(param, "is missing; send it")
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(f"{param}[{index}]", part) for index, part in enumerate(content))


def _part_text(param: str, part: ItemPart) -> str:
    if part.type == "refusal":
        return given(param, "refusal", part.refusal)
    if part.type not in _TEXTS:
        problem = f"is {part.type[:64]!r}: this server reads text only; send parts of type 'input_text'"
        raise field_error(f"{param}.type", problem, UNSUPPORTED)
    return given(param, "text", part.text)


def _arguments(param: str, arguments: str) -> str:
    try:
        if arguments.strip():
            msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        problem = f"is {arguments[:64]!r}, which is no JSON object; send the arguments as one"
        raise field_error(param, problem) from None
    return arguments


def _shown_tool(tool: ResponsesTool) -> dict[str, Json]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }


def _tool_choice(choice: str | ResponsesToolChoice | None) -> AskedChoice:
    match choice:
        case None | "auto":
            return AskedChoice()
        case "none":
            return AskedChoice(mode="none")
        case "required":
            return AskedChoice(mode="required")
        case ResponsesToolChoice(type="function", name=str(name)):
            return AskedChoice(mode="named", names=[name])
        case ResponsesToolChoice(type="function"):
            raise field_error("tool_choice.name", "is missing; send the name of a tool in it")
        case ResponsesToolChoice(type="allowed_tools", mode=mode, tools=tools) if tools is not None:
            return AskedChoice(mode=mode, names=[tool.name for tool in tools])
    kind = choice.type if isinstance(choice, ResponsesToolChoice) else str(choice)
    problem = f"is {kind[:64]!r}, where 'function' and 'allowed_tools' are allowed; send one of these"
    raise field_error("tool_choice.type", problem, UNSUPPORTED)


def _constraint(text: TextSettings | None) -> Constraint | None:
    if text is None:
        return None
    if text.verbosity not in (None, "medium"):
        problem = f"is {text.verbosity[:64]!r}: this server does not have it; leave it out or send 'medium'"
        raise field_error("text.verbosity", problem, UNSUPPORTED)
    match text.format.type if text.format else "text":
        case "text":
            return None
        case "json_object":
            return Constraint(param="text.format", constraint="json_object")
        case "json_schema" if text.format is not None:
            return schema_constraint("text.format.schema", text.format.schema)
        case other:
            problem = f"is {other[:64]!r}, where 'text', 'json_object' and 'json_schema' are allowed; send one of these"
            raise field_error("text.format.type", problem, INVALID)


def _repeated(body: ResponsesBody, model: str) -> str:
    """What the response says of the request, as JSON without spaces."""
    asked: dict[str, Json] = {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": body.reasoning or ReasoningSettings(),
        "store": False,
        "temperature": body.temperature,
        "text": _shown_text(body.text or TextSettings()),
        "tool_choice": _shown_choice(body.tool_choice or "auto"),
        "tools": [_shown_tool(tool) for tool in body.tools or []],
        "top_p": body.top_p,
        "truncation": "disabled",
    }
    if body.user is not None:
        asked["user"] = body.user
    try:
        return msgspec.json.format(msgspec.json.encode(asked), indent=-1).decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ApiError(400, "the body is not valid JSON; correct it") from None


def _shown_text(text: TextSettings) -> dict[str, Json]:
    """The names that this API has, and none besides: a response repeats it in several events."""
    shown: dict[str, Json] = {"format": _shown_format(text.format or TextFormat())}
    return shown if text.verbosity is None else shown | {"verbosity": text.verbosity}


def _shown_format(asked: TextFormat) -> dict[str, Json]:
    if asked.type != "json_schema":
        return {"type": asked.type}
    shown: dict[str, Json] = {"type": asked.type, "name": asked.name, "schema": asked.schema, "strict": asked.strict}
    return shown if asked.description is None else shown | {"description": asked.description}


def _shown_choice(choice: str | ResponsesToolChoice) -> Json:
    if isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        return {"type": choice.type, "mode": choice.mode, "tools": choice.tools}
    return {"type": choice.type, "name": choice.name}
