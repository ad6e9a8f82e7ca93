"""What the API answers in one JSON body, for its description; events of streams are not here.

The engine writes most of them (`plait-openai`). The tests hold its answers to these types: every name is here, and a
name that may be absent says so.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from plait.http.bodies import Json


class _Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An object without further names."""


class ErrorDetail(_Answer):
    """What is wrong, and what to do."""

    message: str
    type: str
    param: str | None
    """The field."""
    code: str | None


class ErrorAnswer(_Answer):
    """OpenAI's error."""

    error: ErrorDetail


class MessagesErrorDetail(_Answer):
    """What is wrong, and what to do."""

    type: str
    message: str


class MessagesErrorAnswer(_Answer):
    """Anthropic's error."""

    type: Literal["error"]
    error: MessagesErrorDetail


class PromptTokensDetails(_Answer):
    """Told to those who may know."""

    cached_tokens: int


class CompletionTokensDetails(_Answer):
    """Told of models whose thoughts are found."""

    reasoning_tokens: int


class Usage(_Answer):
    """Tokens that an answer cost."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CalledFunction(_Answer):
    """A function and its arguments, as JSON."""

    name: str
    arguments: str


class CalledTool(_Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_Answer):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChatToken(_Answer):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ScoredChatToken(ChatToken):
    """An output token, and the best ones in its place."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(_Answer):
    """Log-probabilities of the output tokens."""

    content: list[ScoredChatToken]
    refusal: None


class RankedToken(_Answer):
    """vLLM's form of a prompt token's log-probability."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, RankedToken] | None]
"""By token id; the first token has none."""
FinishReason: TypeAlias = Literal["stop", "length", "abort", "tool_calls", "function_call"]


class ChatChoice(_Answer):
    """One answer of a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(_Answer):
    """Answer of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(_Answer):
    """Log-probabilities of the tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Answer):
    """One answer to a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionAnswer(_Answer):
    """Answer of `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Embedding(_Answer):
    """An input's vector, or its bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(_Answer):
    """Tokens of the inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(_Answer):
    """Answer of `POST /v1/embeddings`."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class ModelCard(_Answer, kw_only=True):
    """A served model as `/v1/models` lists it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Seconds since the epoch."""
    owned_by: str = "plait"
    max_model_len: int
    """Tokens (vLLM's field)."""


class Models(_Answer, kw_only=True):
    """The served model, by each of its names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(_Answer):
    """All is well."""

    status: Literal["ok"] = "ok"
    replicas_lost: list[int] | UnsetType = UNSET


class Version(_Answer):
    """The server's version."""

    version: str


class Load(_Answer):
    """Requests that are not answered yet."""

    server_load: int


class Tokenized(_Answer):
    """Answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(_Answer):
    """Answer of `POST /detokenize`."""

    prompt: str


class TokenizerInfo(_Answer):
    """Answer of `GET /tokenizer_info`."""

    model_max_length: int
    vocab_size: int
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None


class CountedMessages(_Answer):
    """Answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class CountedResponse(_Answer):
    """Answer of `POST /v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"]
    input_tokens: int


OpenDocument: TypeAlias = dict[str, Json]
