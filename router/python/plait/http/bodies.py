"""The bodies of OpenAI's two routes: names and types of the fields that Plait supports.

The limits of the fields are the engine's (`plait-openai`, `limits.rs`). Here are the types of JSON, and the lengths
of what the engine never sees: `user` and `cache_salt`.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

Json: TypeAlias = object
"""Anything that JSON can say: msgspec decodes no recursive type."""

Integer = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""What the engine reads; it knows the range of each field."""


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


TruncationSide = Literal["left", "right"]
ResponseFormatType = Literal["text", "json_object", "json_schema", "structural_tag"]
CHOICES = {
    "role": get_args(Role),
    "reasoning_effort": get_args(ReasoningEffort),
    "effort": get_args(ReasoningEffort),
    "truncation_side": get_args(TruncationSide),
    "tool_choice": ("none", "auto", "required"),
    "function_call": ("none", "auto"),
    "mode": ("auto", "required"),
    "type": get_args(ResponseFormatType),
    "encoding_format": ("float", "base64"),
}
"""The words that a field takes, by its name."""


class SamplingFields(msgspec.Struct, kw_only=True):
    """How tokens are sampled. None: the model's generation_config.json, then OpenAI's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    """vLLM's; -1 and 0 keep the whole vocabulary."""
    min_p: float | None = None
    """vLLM's."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    """vLLM's; of tokens in prompt and output, the others in the output alone."""


class StopFields(SamplingFields, kw_only=True):
    """When an answer ends."""

    max_tokens: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] | None = None
    """vLLM's."""
    ignore_eos: bool | None = None
    """vLLM's."""
    min_tokens: Integer | None = None
    """vLLM's; before so many tokens nothing ends the answer."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream has besides the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's; each chunk says what its choice has cost so far."""
    include_obfuscation: bool | None = None
    """OpenAI's padding against traffic analysis; only false is taken."""


class LogitFields(StopFields, kw_only=True):
    """What changes about the logits, penalties apart."""

    logit_bias: dict[str, float] | None = None
    """Added to tokens, by their ids."""
    allowed_token_ids: list[Integer] | None = None
    """vLLM's; the only tokens that may be sampled."""
    bad_words: list[str] | None = None
    """vLLM's; texts that the answer may not have."""
    logprob_token_ids: list[Integer] | None = None
    """vLLM's; tokens whose log-probabilities come with each output token."""


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """OpenAI's wrapping of a schema. The answer is held to it with `strict` and without."""

    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's form of an answer; vLLM's and SGLang's structural tags have it too."""

    type: ResponseFormatType
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Json]] | None = None
    triggers: list[str] | None = None
    format: Json = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's form of an answer: one of the first six."""

    json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """A JSON schema."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """EBNF (`root ::= ...`) or Lark."""
    json_object: bool | None = None
    structural_tag: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    disable_any_whitespace: bool | None = None
    """JSON without spaces."""
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    """What JSON has between its tokens: a regular expression of spaces."""


class ConstraintFields(LogitFields, kw_only=True):
    """What the answer must be: at most one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """vLLM's."""
    guided_json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """vLLM's older name of `structured_outputs.json`; so on."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """SGLang's; so are the following."""
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class PromptFields(ConstraintFields, kw_only=True):
    """How a prompt becomes tokens; vLLM's."""

    add_special_tokens: bool | None = None
    """The tokenizer's own tokens around a text: by default in completions, where no template writes them."""
    truncate_prompt_tokens: Integer | None = None
    """Tokens to keep at most; -1: as many as the context has room for."""
    truncation_side: TruncationSide | None = None
    """Where tokens go; left unless given."""


class TextFields(PromptFields, kw_only=True):
    """What of the tokens the text shows; vLLM's."""

    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    """True unless given."""
    spaces_between_special_tokens: bool | None = None
    """Both values mean the same: Plait's detokeniser puts no spaces between tokens."""


class ResponseFields(TextFields, kw_only=True):
    """What is sent back."""

    model: str | None = None
    n: Integer | None = None
    """Answers to each prompt."""
    seed: Integer | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Integer | None = None
    """vLLM's."""
    return_token_ids: bool | None = None
    """vLLM's."""
    return_tokens_as_token_ids: bool | None = None
    """vLLM's; log-probabilities name tokens as `token_id:17`."""
    user: Annotated[str, Meta(max_length=1024)] | None = None
    """Whose share the request counts against, with `--trust-user-field`; else it is ignored."""
    priority: Integer | None = None
    """vLLM's; smaller goes first."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    """vLLM's; prompts of another salt share no cached pages with this one."""


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message's content; only text is supported."""

    type: str
    text: str | None = None


class FunctionName(msgspec.Struct, kw_only=True):
    """A function by its name."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """A tool by its name."""

    function: FunctionName


class AllowedTools(msgspec.Struct, kw_only=True):
    """Tools that may be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoice(msgspec.Struct, kw_only=True):
    """One tool, or several that may be called."""

    type: str
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class Message(msgspec.Struct, kw_only=True):
    """One message of a chat."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Json]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Json] | None = None
    """The older form of one call in `tool_calls`."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's newer name of `reasoning_content`."""


class ThoughtFields(ResponseFields, kw_only=True):
    """What the model thinks before it answers a chat."""

    reasoning_effort: ReasoningEffort | None = None
    """Given to the template as `reasoning_effort`, and as `enable_thinking` and `thinking`: false for "none"."""
    thinking_token_budget: Integer | None = None
    """vLLM's; so many tokens may a thought have, then its end follows."""
    include_reasoning: bool | None = None
    """vLLM's; false: the answer comes without the thoughts."""


class ChatBody(ThoughtFields, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    add_generation_prompt: bool | None = None
    """vLLM's; true unless given or `continue_final_message`."""
    continue_final_message: bool | None = None
    """vLLM's; the answer continues the last message, which is the assistant's."""
    tools: list[dict[str, Json]] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: the answer ends after one call."""
    functions: list[dict[str, Json]] | None = None
    """The older form of `tools`."""
    function_call: Literal["none", "auto"] | FunctionName | None = None
    """The older form of `tool_choice`."""
    documents: list[dict[str, Json]] | None = None
    """vLLM's; for templates that know them."""
    chat_template_kwargs: dict[str, Json] | None = None
    """vLLM's; further names for the model's template."""


class CompletionBody(ResponseFields, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | Integer | list[Integer]]
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    logprobs: Integer | None = None
    echo: bool | None = None
    """The answer begins with the prompt, and its `logprobs` with the prompt's."""
