"""`plait.LLM`: a model without a server."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import TypeVar

from plait.http.bodies import Json
from plait.offline.calls import EngineEndedError
from plait.offline.engine_thread import EngineThread
from plait.offline.outputs import EmbeddingRequestOutput, RequestOutput
from plait.offline.prompts import (
    Messages,
    Params,
    Prompts,
    chat_body,
    completion_body,
    conversations_of,
    params_of,
    prompts_of,
)
from plait.offline.requests import Asked, answer_all, chat, complete, embed
from plait.offline.sampling_params import SamplingParams
from plait.offline.settings import read_keywords

Output = TypeVar("Output")


class _Model:
    """What both forms share."""

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: object) -> None:
        path = os.fspath(model) if model is not None else None
        self._engine = EngineThread(path, read_keywords(settings), dict(os.environ))
        self._close = weakref.finalize(self, self._engine.close)

    def _generate(self, prompts: Prompts, params: Params, *, shows_progress: bool) -> Future[list[RequestOutput]]:
        texts = prompts_of(prompts)
        asked = [
            Asked(completion_body(prompt, one), one, prompt if isinstance(prompt, str) else None)
            for prompt, one in zip(texts, params_of(params, len(texts)), strict=True)
        ]
        return self._engine.submit(answer_all(self._engine.calls, complete, asked, shows_progress=shows_progress))

    def _chat(
        self, messages: Messages, params: Params, options: Mapping[str, Json], *, shows_progress: bool
    ) -> Future[list[RequestOutput]]:
        conversations = conversations_of(messages)
        asked = [
            Asked(chat_body(conversation, one, options), one, None)
            for conversation, one in zip(conversations, params_of(params, len(conversations)), strict=True)
        ]
        return self._engine.submit(answer_all(self._engine.calls, chat, asked, shows_progress=shows_progress))

    def _embed(
        self, prompts: Prompts, options: Mapping[str, Json], *, shows_progress: bool
    ) -> Future[list[EmbeddingRequestOutput]]:
        asked = [
            Asked({"input": [prompt]} | dict(options), SamplingParams(), prompt if isinstance(prompt, str) else None)
            for prompt in prompts_of(prompts)
        ]
        return self._engine.submit(answer_all(self._engine.calls, embed, asked, shows_progress=shows_progress))


class LLM(_Model):
    """A model without a server; vLLM's names.

    `model` is a folder, a GGUF file or a hub id; None: the demo model. Settings are those of `plait serve` under their
    names or aliases with underscores: `LLM(model, tp=2, max_num_seqs=32)`. Raises `StartError`, whose message says what
    to do. `with`, `close`, or the end of the process ends the workers.
    """

    def generate(
        self, prompts: Prompts, sampling_params: Params = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """One output for each prompt, in their order. One that fails has an `error` in place of `outputs`.

        `use_tqdm`: show progress on a terminal. Raises `EngineEndedError`.
        """
        return _wait(self._generate(prompts, sampling_params, shows_progress=use_tqdm))

    def chat(
        self, messages: Messages, sampling_params: Params = None, *, use_tqdm: bool = True, **options: Json
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or a list. `options` are further fields of a chat's body: `tools`."""
        return _wait(self._chat(messages, sampling_params, options, shows_progress=use_tqdm))

    def embed(self, prompts: Prompts, *, use_tqdm: bool = True, **options: Json) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt, in their order. `options` are further fields of the API's body: `dimensions`."""
        return _wait(self._embed(prompts, options, shows_progress=use_tqdm))

    def close(self) -> None:
        """End the engine and its workers. Idempotent."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncLLM(_Model):
    """`LLM` for coroutines of any event loop, a notebook's too. Making one blocks until the model is loaded."""

    async def generate(self, prompts: Prompts, sampling_params: Params = None) -> list[RequestOutput]:
        """As `LLM.generate`; calls may be under way at the same time."""
        return await asyncio.wrap_future(self._generate(prompts, sampling_params, shows_progress=False))

    async def chat(self, messages: Messages, sampling_params: Params = None, **options: Json) -> list[RequestOutput]:
        """As `LLM.chat`."""
        return await asyncio.wrap_future(self._chat(messages, sampling_params, options, shows_progress=False))

    async def embed(self, prompts: Prompts, **options: Json) -> list[EmbeddingRequestOutput]:
        """As `LLM.embed`."""
        return await asyncio.wrap_future(self._embed(prompts, options, shows_progress=False))

    async def aclose(self) -> None:
        """End the engine and its workers. Calls that wait get an error. Idempotent."""
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _wait(future: Future[list[Output]]) -> list[Output]:
    try:
        return future.result()
    except CancelledError:
        raise EngineEndedError("the engine was closed") from None
    except BaseException:  # Ctrl-C too
        future.cancel()
        raise
