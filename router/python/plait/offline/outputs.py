"""Answers as vLLM's users know them."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec


class Logprob(msgspec.Struct, frozen=True):
    """Of one token at one position."""

    logprob: float
    rank: int | None
    """From 1 in the whole vocabulary; None for a token that was sampled and is not among the best."""
    decoded_token: str | None


Logprobs = list[dict[int, Logprob]]
"""For each token the sampled one, then the best, by their ids."""


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning_content: str | None = None
    """Chats only; `text` is without it."""
    tool_calls: list[dict[str, Any]] = []
    """Chats only, in OpenAI's form."""


class RequestError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a prompt has no answer; docs/errors.md lists the codes."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    """None if token ids were given, or a chat."""
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = []
    """`n` of them, or none beside an `error`."""
    num_cached_tokens: int | None = None
    finished: bool = True
    error: RequestError | None = None


class EmbeddingOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A vector of length 1."""

    embedding: list[float]


class EmbeddingRequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and its vector."""

    prompt: str | None
    """None if token ids were given."""
    num_prompt_tokens: int = 0
    outputs: EmbeddingOutput | None = None
    """None beside an `error`."""
    finished: bool = True
    error: RequestError | None = None


class _EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int


class EmbeddingsAnswer(msgspec.Struct):
    """The body of one prompt's answer."""

    data: list[EmbeddingOutput]
    usage: _EmbeddingUsage


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] = []


class ScoredToken(NamedTuple):
    """An output token with the best at its position, best first."""

    token: int
    logprob: float
    best: list[tuple[int, float]]


class _ChatToken(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[_ChatToken] = []


class _Scores(msgspec.Struct):
    """Of a completion, or `content` of a chat."""

    tokens: list[str] = []
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float]] | None = None
    content: list[_ChatToken] = []

    def scored(self) -> list[ScoredToken]:
        if self.content:
            return [
                ScoredToken(_id(it.token), it.logprob, [(_id(top.token), top.logprob) for top in it.top_logprobs])
                for it in self.content
            ]
        tops = self.top_logprobs or [{}] * len(self.tokens)
        return [
            ScoredToken(_id(token), logprob, [(_id(name), of_it) for name, of_it in top.items()])
            for token, logprob, top in zip(self.tokens, self.token_logprobs, tops, strict=True)
        ]


class Choice(msgspec.Struct):
    """A choice in a body of either route."""

    index: int
    token_ids: list[int]
    finish_reason: str
    text: str = ""
    message: _Message = msgspec.field(default_factory=_Message)
    stop_reason: int | str | None = None
    logprobs: _Scores | None = None
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def scored(self) -> list[ScoredToken]:
        return self.logprobs.scored() if self.logprobs is not None else []

    def output(self, pieces: dict[int, str], num_best: int | None) -> CompletionOutput:
        """As `generate` returns it; `pieces` are the texts of the tokens in `scored`."""
        scored = self.scored()
        return CompletionOutput(
            index=self.index,
            text=self.text or self.message.content or "",
            token_ids=self.token_ids,
            cumulative_logprob=sum(it.logprob for it in scored) if num_best is not None else None,
            logprobs=[_position(it, pieces, num_best) for it in scored] if num_best is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            reasoning_content=self.message.reasoning_content,
            tool_calls=self.message.tool_calls,
        )


class _PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class Body(msgspec.Struct):
    """What of an answer's body is read here."""

    id: str
    choices: list[Choice]
    usage: _Usage
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def num_cached_tokens(self) -> int | None:
        details = self.usage.prompt_tokens_details
        return details.cached_tokens if details is not None else None


class _Error(msgspec.Struct):
    message: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """OpenAI's."""

    error: _Error


def _id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _position(scored: ScoredToken, pieces: dict[int, str], num_best: int) -> dict[int, Logprob]:
    ranks = {token: rank for rank, (token, _) in enumerate(scored.best[:num_best], 1)}
    listed = {scored.token: scored.logprob} | dict(scored.best)
    return {token: Logprob(logprob, ranks.get(token), pieces[token]) for token, logprob in listed.items()}
