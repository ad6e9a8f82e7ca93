"""The body of `POST /v1/responses`: names and types of the fields that Plait supports."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from plait.http.bodies import Integer, Json, ReasoningEffort, SamplingFields, StreamOptions
from plait.http.unsupported import Neutral

UNSUPPORTED_RESPONSES: Neutral = {
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "context_management": ([],),
    "moderation": (),
    "stop": ([],),
    "stop_token_ids": ([],),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "structured_outputs": (),
}
"""As in `plait.http.unsupported`. Plait keeps no response, so that none can be continued or asked for later."""


class ItemPart(msgspec.Struct, kw_only=True):
    """A part of an item's content; only texts are supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """An item of the input: what it may have follows from its type."""

    type: str | None = None
    """Left out: a message."""
    role: str | None = None
    content: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None


class ResponsesTool(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Json] | None = None
    strict: bool | None = None


class ResponsesToolName(msgspec.Struct, kw_only=True):
    """A function by its name."""

    type: str = "function"
    name: str = ""


class ResponsesToolChoice(msgspec.Struct, kw_only=True):
    """One tool that must be called, or the ones that may be."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[ResponsesToolName] | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """What the answer must be."""

    type: str = "text"
    name: str | None = None
    """Given back, as the next two."""
    description: str | None = None
    strict: bool | None = None
    """A schema holds in any case."""
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class TextSettings(msgspec.Struct, kw_only=True):
    """The text of the answer."""

    format: TextFormat | None = None
    verbosity: str | None = None
    """Only "medium" is taken."""


class ReasoningSettings(msgspec.Struct, kw_only=True):
    """How the model thinks."""

    effort: ReasoningEffort | None = None
    summary: str | None = None
    """Taken; thoughts come whole, and no summary is written."""


# budget: one field per field of the API
class ResponsesBody(SamplingFields, kw_only=True):
    """Body of `POST /v1/responses`."""

    input: str | list[InputItem]
    instructions: str | None = None
    model: str | None = None
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    """OpenAI's bounds; given back."""
    max_output_tokens: Integer | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: the answer ends after one call."""
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    """Taken, and nothing is stored."""
    seed: Integer | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None
    priority: Integer | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
