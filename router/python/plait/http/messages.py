"""From the body of Anthropic's `POST /v1/messages` to a chat whose answer is a message."""

from __future__ import annotations

import os
import time

import msgspec
from msgspec.structs import replace

from plait.http.api import AnswerProtocol, GenerateRequest
from plait.http.bodies import Json, SamplingFields
from plait.http.body_errors import UNSUPPORTED, field_error
from plait.http.body_reader import ServedNames, check_free_form, decode, given, served_name
from plait.http.constraints import Constraint, schema_constraint
from plait.http.conversation import Conversation
from plait.http.function_tools import function_tools
from plait.http.identity import ClientIdentity
from plait.http.messages_body import (
    UNSUPPORTED_MESSAGES,
    ContentBlock,
    ContextManagement,
    CountTokensBody,
    MessageParam,
    MessagesBody,
    MessagesToolChoice,
    ResultPart,
    Thinking,
)
from plait.http.tools import AskedChoice
from plait.http.validate import ANONYMOUS

_TAKEN_EDITS = ("clear_thinking_20251015",)


class _Thoughts(msgspec.Struct, frozen=True):
    """What the request says of thoughts, as chats say it."""

    are_shown: bool = False
    effort: str | None = "none"
    budget: int | None = None
    template: dict[str, Json] = {}


def read_message(raw: bytes, served: ServedNames, client: ClientIdentity = ANONYMOUS) -> GenerateRequest:
    """The request in the body of `POST /v1/messages`; raises `ApiError`."""
    body = decode(raw, MessagesBody, UNSUPPORTED_MESSAGES)
    return replace(
        _request(body, served, body.max_tokens),
        stream=bool(body.stream),
        prompt_tokens_details=client.reads_cached_tokens(body.cache_salt),
        max_tokens=body.max_tokens,
        sampling=SamplingFields(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k),
        seed=body.seed,
        stop=body.stop_sequences or [],
        priority=body.priority or 0,
        tenant=client.tenant(body.metadata.user_id if body.metadata else None),
        salt=client.salt(body.cache_salt),
    )


def read_message_to_count(raw: bytes, served: ServedNames, client: ClientIdentity = ANONYMOUS) -> GenerateRequest:
    """The request in the body of `POST /v1/messages/count_tokens`; raises `ApiError`."""
    body = decode(raw, CountTokensBody, UNSUPPORTED_MESSAGES)
    return replace(_request(body, served, None), tenant=client.tenant(None))


def _request(body: CountTokensBody, served: ServedNames, max_tokens: int | None) -> GenerateRequest:
    _check_edits(body.context_management)
    thoughts, messages = _thoughts(body, max_tokens), _messages(body)
    is_continued = bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    return GenerateRequest(
        kind="chat",
        id=f"msg_{os.urandom(12).hex()}",
        created=int(time.time()),
        model=served_name(body.model, served),
        stream=False,
        include_usage=False,
        messages=messages,
        chat_template_kwargs=thoughts.template,
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
        reasoning_effort=thoughts.effort,
        thinking_token_budget=thoughts.budget,
        include_reasoning=thoughts.are_shown,
        tools=function_tools(body.tools or [], (None, "custom"), "send tools with an `input_schema`"),
        tool_choice=_tool_choice(body.tool_choice),
        single_call=body.tool_choice is not None and bool(body.tool_choice.disable_parallel_tool_use),
        protocol=AnswerProtocol(name="messages"),
        sampling=SamplingFields(),
        constraint=_constraint(body),
    )


def _check_edits(asked: ContextManagement | None) -> None:
    for index, edit in enumerate((asked.edits if asked else None) or []):
        if edit.type not in _TAKEN_EDITS:
            problem = f"is {edit.type[:64]!r}: this server keeps the conversation as it is sent; leave it out"
            raise field_error(f"context_management.edits[{index}].type", problem, UNSUPPORTED)


def _thoughts(body: CountTokensBody, max_tokens: int | None) -> _Thoughts:
    """Without `thinking` the model does not think, as Anthropic's does not."""
    effort = body.output_config.effort if body.output_config else None
    match body.thinking:
        case None | Thinking(type="disabled"):
            return _Thoughts()
        case Thinking(type="adaptive"):
            return _Thoughts(_are_shown(body.thinking), effort, None, _switches(effort))
        case Thinking(type="enabled", budget_tokens=int(budget)):
            # A thought that may take the whole answer has no bound of its own.
            bound = budget if max_tokens is None or budget + 1 < max_tokens else None
            return _Thoughts(_are_shown(body.thinking), effort, bound, _switches(effort))
        case Thinking(type="enabled"):
            raise field_error("thinking.budget_tokens", "is missing; send the most tokens that a thought may have")
        case Thinking(type=other):
            problem = f"is {other[:64]!r}, where 'enabled', 'adaptive' and 'disabled' are allowed; send one of these"
            raise field_error("thinking.type", problem)


def _are_shown(thinking: Thinking) -> bool:
    return thinking.display != "omitted"


def _switches(effort: str | None) -> dict[str, Json]:
    """What templates read that think only when they are told to."""
    return {} if effort else {"enable_thinking": True, "thinking": True}


def _messages(body: CountTokensBody) -> list[dict[str, Json]]:
    conversation = Conversation()
    if body.system:
        conversation.instruct(_system(body.system))
    for index, message in enumerate(body.messages):
        _add_message(f"messages[{index}]", message, conversation)
    return conversation.messages()


def _system(system: str | list[ContentBlock]) -> str:
    if isinstance(system, str):
        return system
    return "\n".join(_block_text(f"system[{index}]", block) for index, block in enumerate(system))


def _add_message(param: str, message: MessageParam, conversation: Conversation) -> None:
    content = message.content
    blocks = [ContentBlock(type="text", text=content)] if isinstance(content, str) else content
    match message.role:
        case "user":
            _add_user_blocks(f"{param}.content", blocks, conversation)
        case "assistant":
            for index, block in enumerate(blocks):
                _add_assistant_block(f"{param}.content[{index}]", block, conversation)
        case "system":
            conversation.instruct(_system(content))
        case role:
            problem = f"is {role[:64]!r}, where 'user' and 'assistant' are allowed; send one of these"
            raise field_error(f"{param}.role", problem)


def _add_user_blocks(param: str, blocks: list[ContentBlock], conversation: Conversation) -> None:
    """Results first: they answer the calls of the message before."""
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if block.type == "tool_result":
            _add_result(f"{param}[{index}]", block, conversation)
        else:
            texts.append(_block_text(f"{param}[{index}]", block, "'text' and 'tool_result'"))
    if texts or not blocks:
        conversation.ask("\n".join(texts))


def _add_result(param: str, block: ContentBlock, conversation: Conversation) -> None:
    call_id = given(param, "tool_use_id", block.tool_use_id)
    if not conversation.answers_call(call_id):
        problem = f"is {call_id[:64]!r}, which no tool_use of the message before has; send the call too"
        raise field_error(f"{param}.tool_use_id", problem)
    parts = block.content or ""
    if not isinstance(parts, str):
        parts = "\n".join(_block_text(f"{param}.content[{index}]", part) for index, part in enumerate(parts))
    conversation.result(call_id, f"Error: {parts}" if block.is_error else parts)


def _add_assistant_block(param: str, block: ContentBlock, conversation: Conversation) -> None:
    match block.type:
        case "thinking":
            if block.thinking:
                conversation.think(block.thinking)
        case "redacted_thinking":
            pass  # nobody but its maker can read it
        case "tool_use":
            call_id, name = given(param, "id", block.id), given(param, "name", block.name)
            check_free_form(f"{param}.input", block.input)
            conversation.call(call_id, name, block.input or {})
        case _:
            conversation.say(_block_text(param, block, "'text', 'thinking' and 'tool_use'"))


def _block_text(param: str, block: ContentBlock | ResultPart, allowed: str = "'text'") -> str:
    if block.type != "text":
        problem = f"is {block.type[:64]!r}: this server reads text only; {allowed} are allowed here"
        raise field_error(f"{param}.type", problem, UNSUPPORTED)
    return given(param, "text", block.text)


def _tool_choice(choice: MessagesToolChoice | None) -> AskedChoice:
    match choice:
        case None | MessagesToolChoice(type="auto"):
            return AskedChoice()
        case MessagesToolChoice(type="none"):
            return AskedChoice(mode="none")
        case MessagesToolChoice(type="any"):
            return AskedChoice(mode="required")
        case MessagesToolChoice(type="tool", name=str(name)):
            return AskedChoice(mode="named", names=[name])
        case MessagesToolChoice(type="tool"):
            raise field_error("tool_choice.name", "is missing; send the name of a tool in it")
        case MessagesToolChoice(type=other):
            problem = f"is {other[:64]!r}, where 'auto', 'any', 'tool' and 'none' are allowed; send one of these"
            raise field_error("tool_choice.type", problem)


def _constraint(body: CountTokensBody) -> Constraint | None:
    param, asked = "output_config.format", body.output_config.format if body.output_config else None
    if asked is None:
        param, asked = "output_format", body.output_format
    if asked is None:
        return None
    if asked.type != "json_schema":
        problem = f"is {asked.type[:64]!r}, where 'json_schema' is allowed; send that or leave it out"
        raise field_error(f"{param}.type", problem)
    return schema_constraint(f"{param}.schema", asked.schema)
