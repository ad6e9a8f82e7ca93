"""Calls of the API's paths without HTTP: a body goes in, a status and a body come out."""

from __future__ import annotations

import asyncio

import msgspec

from plait.http.body_reader import ServedNames
from plait.http.embeddings import embeddings_reader
from plait.http.engine import EngineHandle, read_status
from plait.http.errors import ApiError
from plait.http.generate import Reader
from plait.http.identity import ClientIdentity
from plait.http.responses import read_response
from plait.http.streams import Data, Failure, Stream, Streams
from plait.http.validate import read_chat, read_completion
from plait.settings import HttpSettings, ServeSettings

READERS: dict[str, Reader] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    "/v1/responses": read_response,
    "/v1/embeddings": embeddings_reader("last"),
}
"""Embeddings are pooled as the settings say."""
QUEUE_FULL = 429
RETRY_SECONDS = 0.05
"""Before a call is made again that the queue had no room for."""
_CLIENT = ClientIdentity(http=HttpSettings(enable_prompt_tokens_details=True))


class Answer(msgspec.Struct, frozen=True):
    """What HTTP would have answered."""

    status: int
    body: bytes


class EngineEndedError(RuntimeError):
    """The engine failed or was closed before it had answered."""


class Calls:
    """The calls of an engine. Use it on the engine's event loop."""

    def __init__(self, engine: EngineHandle, streams: Streams, names: ServedNames, settings: ServeSettings) -> None:
        self._engine, self._streams, self._names = engine, streams, names
        max_seqs = settings.scheduler.max_seqs
        assert max_seqs is not None, "with_sizes fills it in"
        self.max_in_flight = min(settings.scheduler.max_queue, 2 * max_seqs * settings.process.dp)
        """Calls at a time that keep the engine busy; the others need not be in memory."""
        self._readers = READERS | {"/v1/embeddings": embeddings_reader(settings.pooling.pooling)}
        self._pieces: dict[int, str] = {}

    async def ask(self, path: str, body: bytes) -> Answer:
        """The whole answer to a body that `path` of `READERS` takes. Waits while the queue is full.

        Raises `EngineEndedError`.
        """
        try:
            request = self._readers[path](body, self._names, _CLIENT)
            if request.stream:
                raise ApiError(400, "`stream` is true, and nobody reads the answer's parts here; leave it out")
        except ApiError as error:
            return Answer(error.status, error.body())
        raw = msgspec.json.encode(request)
        while (answer := await self._whole(self._streams.open(raw))).status == QUEUE_FULL:
            await asyncio.sleep(RETRY_SECONDS)
        if answer.status >= 500 and (status := read_status(self._engine)).phase != "ready":
            raise EngineEndedError(status.reason or "the engine was closed")
        return answer

    async def piece(self, token: int) -> str:
        """A token's text."""
        if token not in self._pieces:
            call = msgspec.json.encode({"call": "detokenize", "tokens": [token]})
            answer = await self._whole(self._streams.open_text(call))
            self._pieces[token] = msgspec.json.decode(answer.body).get("prompt", "")
        return self._pieces[token]

    async def _whole(self, stream: Stream) -> Answer:
        body = bytearray()
        try:
            while True:
                part = await stream.next()
                if isinstance(part, Failure):
                    return Answer(part.status, part.body)
                assert isinstance(part, Data), "no client leaves"
                body += part.payload
                if part.last:
                    return Answer(200, bytes(body))
        finally:
            stream.close()
