"""What the HTTP server hands to the engine: a request with OpenAI's alternatives resolved.

Requests reach it through raw ASGI routes (`generate`), not through FastAPI: the engine's bytes go to the client as
they are. FastAPI serves the other paths. `openapi` describes all of them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from plait.http.bodies import SamplingFields
from plait.http.constraints import Constraint
from plait.http.tools import AskedChoice
from plait.settings import Pooling


class AnswerProtocol(msgspec.Struct, frozen=True, kw_only=True):
    """The API that a chat came by, and in which it is answered; mirrored by `Protocol` of `plait-openai`."""

    name: Literal["chat", "responses", "messages"] = "chat"
    fields: str = ""
    """A JSON object without spaces: what an answer of `/v1/responses` repeats of the request."""


class EmbeddingFields(msgspec.Struct, frozen=True, kw_only=True):
    """How a prompt's vector is made and told; mirrored by serde in `plait-openai`."""

    pooling: Pooling
    dimensions: int | None
    is_base64: bool


# budget: one field per field of the API
class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a route that generates; mirrored by serde in `plait-openai`.

    Responses and messages are chats whose answers have another form.

    None means "not given": the model's generation_config.json decides, then OpenAI's default.
    """

    kind: Literal["chat", "completion"]
    id: str
    """`chatcmpl-...`, `cmpl-...`, `resp_...` or `msg_...`; chats and completions repeat it in every chunk."""
    created: int
    """Seconds since the epoch."""
    model: str
    """The name to repeat in the answer."""
    stream: bool
    include_usage: bool
    """A last chunk with the usage (streams); whole answers always have it."""
    continuous_usage_stats: bool = False
    """Each chunk says what its choice has cost so far."""
    prompt_tokens_details: bool = False
    """The usage says how many prompt tokens the prefix cache had."""
    messages: list[dict[str, Any]] = []
    """Chat only: at least one, as the template wants them."""
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Chat only: the answer continues the last message."""
    reasoning_effort: str | None = None
    """Chat only: for the template."""
    thinking_token_budget: int | None = None
    """Chat only: tokens of a thought."""
    documents: list[dict[str, Any]] = []
    """Chat only: for the template."""
    tools: list[dict[str, Any]] = []
    """Chat only: what the model may call."""
    tool_choice: AskedChoice = AskedChoice()
    single_call: bool = False
    are_functions: bool = False
    include_reasoning: bool = True
    """Chat only: the answer has the thoughts."""
    protocol: AnswerProtocol = AnswerProtocol()
    """Chat only."""
    prompts: list[str | list[int]] = []
    """Completions only: at least one. The choices of the first come first, then those of the others."""
    echo: bool = False
    """Completions only: the answer begins with the prompt."""
    n: int | None = None
    """Answers to each prompt."""
    add_special_tokens: bool | None = None
    """The tokenizer's own tokens around a text. None: in completions."""
    truncate_prompt_tokens: int | None = None
    """Tokens to keep of the prompt; -1: as many as the context has room for."""
    truncation_side: Literal["left", "right"] = "left"
    max_tokens: int | None = None
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The name under which the client gave it, for errors."""
    sampling: SamplingFields
    seed: int | None = None
    """64 bits; random if it is not given."""
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int | None = None
    """Before so many tokens nothing ends the answer."""
    logit_bias: dict[str, float] = {}
    """Added to tokens, by their ids."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be sampled."""
    bad_words: list[str] = []
    logprob_token_ids: list[int] = []
    """Listed with each output token behind the best ones."""
    constraint: Constraint | None = None
    """What the answer must be."""
    logprobs: int | None = None
    """Best tokens to list with each output token; 0: the token's own log-probability only."""
    prompt_logprobs: int | None = None
    priority: int = 0
    """Smaller goes first; only servers with `--policy priority` or `fair` take one."""
    tenant: int = 0
    """Whose share it counts against, as a number (`plait.http.identity`)."""
    weight: int = 1
    """The tenant's share against others' with `--policy fair`: its key's."""
    salt: int = 0
    """Requests of different salts share no cached pages."""
    return_token_ids: bool = False
    """vLLM's field: `token_ids` in each choice or chunk, `prompt_token_ids` in the answer."""
    return_tokens_as_token_ids: bool = False
    """Log-probabilities name tokens as `token_id:17`."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    embedding: EmbeddingFields | None = None
    """The answer is a vector for each prompt; without output tokens."""
