"""From the raw reads of streams to their tokens, and to the time between a token's sending by a worker and its read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httptools
import numpy as np
import numpy.typing as npt
from bench.dp.mock_worker import NUM_TOKENS
from bench.http.raw_reader import Read, ReaderError
from plait.bench.response import Response

Times = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sends:
    """What a mock worker sent: an id a step, each the one after the last's, and when."""

    ids: Ids
    times: Times

    @classmethod
    def of(cls, folder: Path) -> Sends:
        """As the first rank wrote them into its `MOCK_TIMES`."""
        ids, times = zip(*json.loads((folder / "sends-0.json").read_text()), strict=True)
        return cls(np.array(ids), np.array(times))


@dataclass(frozen=True)
class Tokens:
    """The tokens of a stream, with the time of the read that brought each."""

    ids: Ids
    times: Times
    num_chunks: int
    num_single: int
    """Chunks of one token."""

    @classmethod
    def of(cls, reads: Sequence[Read]) -> Tokens:
        """Raises `ReaderError` unless they are a whole answer with token ids."""
        response = Answer(reads).response
        if response.failure is not None or response.token_ids is None:
            raise ReaderError(f"a stream failed: {response.failure}: {response.detail}")
        counts = np.array(response.counts, dtype=np.int64)
        times = np.repeat(np.array(response.times), counts)
        return cls(np.array(response.token_ids), times, len(counts), int(np.count_nonzero(counts == 1)))

    def added(self, sends: Sends) -> Times:
        """Seconds from a token's sending to its read.

        A stream's ids tell how many steps lie between its tokens; that all were sent before they were read tells which
        step was its first, unless each took longer than `NUM_TOKENS` steps.
        """
        since_first = np.concatenate([[0], np.cumsum((np.diff(self.ids) - 1) % NUM_TOKENS + 1)])
        for first in np.flatnonzero(sends.ids == self.ids[0])[::-1]:
            steps = first + since_first
            if steps[-1] < len(sends.times):
                added: Times = self.times - sends.times[steps]
                if added.min() >= 0:
                    return added
        raise ReaderError("a stream's tokens are not those that the worker sent")


class Answer:
    """An HTTP answer that was read before; httptools calls its methods."""

    def __init__(self, reads: Sequence[Read]) -> None:
        self.response = Response(streamed=True, counting="token-ids", keeps_ids=True)
        self._parser, self._now = httptools.HttpResponseParser(self), 0.0
        for self._now, data in reads:
            self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self.response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.response.feed(self._now, body)

    def on_message_complete(self) -> None:
        self.response.finish()
