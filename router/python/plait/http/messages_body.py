"""The bodies of Anthropic's `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from plait.http.bodies import Integer, Json, ReasoningEffort
from plait.http.unsupported import Neutral

UNSUPPORTED_MESSAGES: Neutral = {
    "container": (),
    "mcp_servers": ([],),
    "inference_geo": (),
    "speed": ("standard",),
}
"""As in `plait.http.unsupported`. Beta headers, `metadata`, `service_tier` and `cache_control` are taken."""


class ResultPart(msgspec.Struct, kw_only=True):
    """A part of a tool's result; only texts are supported."""

    type: str
    text: str | None = None


class ContentBlock(msgspec.Struct, kw_only=True):
    """A block of a message: what it may have follows from its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Json] | None = None
    tool_use_id: str | None = None
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None


class MessageParam(msgspec.Struct, kw_only=True):
    """A message of the conversation."""

    role: str
    content: str | list[ContentBlock]


class MessagesTool(msgspec.Struct, kw_only=True):
    """A tool that the client runs."""

    name: str
    type: str | None = None
    """"custom" unless given."""
    description: str | None = None
    parameters: dict[str, Json] | None = msgspec.field(default=None, name="input_schema")
    strict: bool | None = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    """Which tools may be called."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None
    """The answer ends after one call."""


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model thinks, and for how long."""

    type: str
    budget_tokens: Integer | None = None
    display: str | None = None
    """"omitted": the answer comes without the thoughts."""


class OutputFormat(msgspec.Struct, kw_only=True):
    """What the answer must be."""

    type: str
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class OutputConfig(msgspec.Struct, kw_only=True):
    """How much the model thinks, and what the answer must be."""

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class Edit(msgspec.Struct, kw_only=True):
    """What a server would take out of the conversation."""

    type: str


class ContextManagement(msgspec.Struct, kw_only=True):
    """Only the clearing of thoughts is taken, which templates do by themselves."""

    edits: list[Edit] | None = None


class Metadata(msgspec.Struct, kw_only=True):
    """Who asks."""

    user_id: Annotated[str, Meta(max_length=1024)] | None = None
    """The tenant with `--trust-user-field`, else ignored."""


class CountTokensBody(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`."""

    messages: list[MessageParam]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older place of `output_config.format`."""
    context_management: ContextManagement | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: Integer
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    seed: Integer | None = None
    """Ours."""
    priority: Integer | None = None
    """vLLM's; so is the next."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
