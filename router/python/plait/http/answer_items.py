"""Answers of `/v1/responses` and `/v1/messages`, whose outputs are lists of items; for their description."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from plait.http.answer_bodies import OpenDocument
from plait.http.bodies import Json
from plait.http.responses_body import ReasoningSettings


class _Item(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """An object without further names, of one type."""


class ReasoningText(_Item, tag="reasoning_text"):
    """A thought."""

    text: str


class OutputText(_Item, tag="output_text"):
    """A text."""

    text: str
    annotations: list[None]
    logprobs: list[None]


ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class ReasoningItem(_Item, tag="reasoning"):
    """What the model thought."""

    id: str
    summary: list[None]
    content: list[ReasoningText]
    encrypted_content: None
    status: ItemStatus


class MessageItem(_Item, tag="message"):
    """What the model said."""

    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class FunctionCallItem(_Item, tag="function_call"):
    """A call of a tool."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class _Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An object without further names."""


class IncompleteDetails(_Answer):
    """Why a response is cut."""

    reason: str


class InputTokensDetails(_Answer):
    """Tokens that the prefix cache had; what it takes in is not counted."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokensDetails(_Answer):
    """Tokens of thoughts."""

    reasoning_tokens: int


class ResponseUsage(_Answer):
    """Tokens that a response cost."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


# budget: one field per field of the API
class ResponseAnswer(_Answer):
    """Answer of `POST /v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    output: list[ReasoningItem | MessageItem | FunctionCallItem]
    usage: ResponseUsage
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: ReasoningSettings
    store: Literal[False]
    temperature: float | None
    text: OpenDocument
    tool_choice: str | OpenDocument
    tools: list[OpenDocument]
    top_p: float | None
    truncation: Literal["disabled"]
    user: str | UnsetType = UNSET


class ThinkingBlock(_Item, tag="thinking"):
    """A thought."""

    thinking: str
    signature: Literal[""]


class TextBlock(_Item, tag="text"):
    """A text."""

    text: str


class ToolUseBlock(_Item, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Json]


class ThinkingTokens(_Answer):
    """Told of models whose thoughts are found."""

    thinking_tokens: int


class MessageUsage(_Answer):
    """Tokens that a message cost."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class MessageAnswer(_Answer):
    """Answer of `POST /v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ThinkingBlock | TextBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
