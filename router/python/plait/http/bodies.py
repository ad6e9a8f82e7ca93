"""The bodies of OpenAI's two routes: names, types and ranges of the fields that Plait has.

Bounds that OpenAI does not state keep one request from holding more than a server can give.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

Json: TypeAlias = object
"""Anything that JSON can say: msgspec decodes no recursive type."""

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
TokenCount = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
NumBest = Annotated[int, Meta(ge=0, le=20)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]


class SamplingFields(msgspec.Struct, kw_only=True):
    """How tokens are drawn. None: the model's generation_config.json, then OpenAI's default."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    """vLLM's; -1 and 0 keep the whole vocabulary."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """vLLM's."""
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None


class EndingFields(SamplingFields, kw_only=True):
    """When an answer ends."""

    max_tokens: TokenCount | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    """vLLM's."""
    ignore_eos: bool | None = None
    """vLLM's."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream holds beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's; only its neutral value, false, is taken."""
    include_obfuscation: bool | None = None
    """OpenAI's padding against traffic analysis; only false is taken."""


class AnswerFields(EndingFields, kw_only=True):
    """What is sent back."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: NumBest | None = None
    """vLLM's."""
    return_token_ids: bool | None = None
    """vLLM's."""
    user: Annotated[str, Meta(max_length=1024)] | None = None
    """Whose share the request counts against where no API key says so."""
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None
    """vLLM's; smaller goes first."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    """vLLM's; prompts of another salt share no cached pages with this one."""


class ContentPart(msgspec.Struct, kw_only=True):
    """A piece of a message; only text is served."""

    type: str
    text: str | None = None


Role = Literal["system", "developer", "user", "assistant", "tool"]


class Message(msgspec.Struct, kw_only=True):
    """One message of a chat."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Json]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatBody(AnswerFields, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: NumBest | None = None
    add_generation_prompt: bool | None = None
    """vLLM's; true unless given."""
    chat_template_kwargs: Annotated[dict[str, Json], Meta(max_length=32)] | None = None
    """vLLM's; further names for the model's template."""


class CompletionBody(AnswerFields, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]]
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    logprobs: NumBest | None = None
