"""Lists of prompts through the engine: bounded in flight, their order kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from plait.http.bodies import Json
from plait.http.errors import ApiError
from plait.offline.calls import Answer, Calls
from plait.offline.outputs import (
    Body,
    Choice,
    EmbeddingRequestOutput,
    EmbeddingsAnswer,
    ErrorBody,
    RequestError,
    RequestOutput,
)
from plait.offline.progress import Progress
from plait.offline.sampling_params import SamplingParams

Output = TypeVar("Output")


class Asked(NamedTuple):
    """One prompt or conversation."""

    body: dict[str, Json]
    params: SamplingParams
    prompt: str | None


async def answer_all(
    calls: Calls, answer: Callable[[Calls, Asked], Awaitable[Output]], asked: Sequence[Asked], *, shows_progress: bool
) -> list[Output]:
    """One output for each, in order. Raises `EngineEndedError`."""
    places = asyncio.Semaphore(calls.max_in_flight)
    with Progress(len(asked), is_shown=shows_progress) as progress:

        async def answer_one(one: Asked) -> Output:
            async with places:
                output = await answer(calls, one)
            progress.advance()
            return output

        return await asyncio.gather(*(answer_one(one) for one in asked))


async def _ask(calls: Calls, path: str, asked: Asked) -> Answer:
    try:
        raw = msgspec.json.encode(asked.body)
    except (TypeError, ValueError) as error:
        return Answer(400, ApiError(400, f"the request has no form in JSON: {error}; correct it").body())
    return await calls.ask(path, raw)


async def embed(calls: Calls, asked: Asked) -> EmbeddingRequestOutput:
    """The vector of a prompt."""
    answer = await _ask(calls, "/v1/embeddings", asked)
    if answer.status != 200:
        return EmbeddingRequestOutput(prompt=asked.prompt, error=request_error(answer))
    body = msgspec.json.decode(answer.body, type=EmbeddingsAnswer)
    return EmbeddingRequestOutput(prompt=asked.prompt, num_prompt_tokens=body.usage.prompt_tokens, outputs=body.data[0])


async def complete(calls: Calls, asked: Asked) -> RequestOutput:
    """The answers to a prompt."""
    return await _answer(calls, "/v1/completions", asked)


async def chat(calls: Calls, asked: Asked) -> RequestOutput:
    """The answers to a conversation."""
    return await _answer(calls, "/v1/chat/completions", asked)


async def _answer(calls: Calls, path: str, asked: Asked) -> RequestOutput:
    answer = await _ask(calls, path, asked)
    if answer.status != 200:
        return RequestOutput(request_id="", prompt=asked.prompt, error=request_error(answer))
    body = msgspec.json.decode(answer.body, type=Body)
    first = body.choices[0]
    num_best = asked.params.logprobs
    if num_best is None and asked.params.logprob_token_ids:
        num_best = 0
    pieces = await _pieces(calls, body.choices)
    return RequestOutput(
        request_id=body.id,
        prompt=asked.prompt,
        prompt_token_ids=body.prompt_token_ids or first.prompt_token_ids,
        prompt_logprobs=body.prompt_logprobs or first.prompt_logprobs,
        outputs=[choice.output(pieces, num_best) for choice in body.choices],
        num_cached_tokens=body.num_cached_tokens(),
    )


def request_error(answer: Answer) -> RequestError:
    """The error in a body that is not 200."""
    error = msgspec.json.decode(answer.body, type=ErrorBody).error
    return RequestError(status=answer.status, message=error.message, param=error.param, code=error.code)


async def _pieces(calls: Calls, choices: Sequence[Choice]) -> dict[int, str]:
    """The texts of the tokens that have log-probabilities."""
    tokens = {token for choice in choices for it in choice.scored() for token in (it.token, *dict(it.best))}
    return {token: await calls.piece(token) for token in tokens}
