"""Greedy and seeded streams under way, and what they have lost."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import httpx

NUM_STREAMS = 4
NUM_TOKENS = 48
STREAM_SECONDS = 300.0


class Stream(threading.Thread):
    """One answer, with the time of each token."""

    def __init__(self, url: str, number: int, **fields: Any) -> None:
        super().__init__()
        sampling = {"temperature": 0} if number % 2 == 0 else {"temperature": 1.0, "seed": number}
        self._url = f"{url}/v1/completions"
        self._body = {"prompt": f"count {number} 9", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        self._body |= sampling | {"logprobs": 0} | fields
        self.status = 0
        self.tokens: list[str] = []
        self.times: list[float] = []
        self.error = ""
        """Why it ended early, if it was told."""
        self.ended_at = 0.0
        self.has_begun = threading.Event()
        self.start()

    def run(self) -> None:
        with suppress(httpx.HTTPError):
            self._read()
        self.ended_at = time.monotonic()

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=STREAM_SECONDS) as got:
            self.status = got.status_code
            for line in got.iter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, event: dict[str, Any]) -> None:
        self.error = event.get("error", {}).get("message", self.error)
        for choice in event.get("choices", []):
            if choice["logprobs"] is not None:
                self.tokens += choice["logprobs"]["tokens"]
                self.times += [time.monotonic()] * len(choice["logprobs"]["tokens"])
                if len(self.tokens) >= 3:
                    self.has_begun.set()

    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    def num_before_pause(self) -> int:
        """Tokens that it had when its longest pause began."""
        gaps = self.gaps()
        return gaps.index(max(gaps)) + 1

    def resumed_at(self) -> float:
        """When its longest pause ended."""
        return self.times[self.num_before_pause()]


def ask(url: str, num: int = NUM_STREAMS, **fields: Any) -> list[Stream]:
    """So many streams at once."""
    return [Stream(url, number, **fields) for number in range(num)]


def answers(url: str, num: int = NUM_STREAMS, **fields: Any) -> list[list[str]]:
    """The tokens of these streams without a fault."""
    return tokens(ask(url, num, **fields))


def tokens(streams: Sequence[Stream]) -> list[list[str]]:
    """Their answers, once all have ended."""
    for one in streams:
        one.join()
    return [one.tokens for one in streams]


def losses(given: Sequence[Sequence[str]], right: Sequence[Sequence[str]]) -> dict[str, float]:
    """What the answers have too few, too many or otherwise."""
    pairs = list(zip(given, right, strict=True))
    return {
        "wrong_streams": sum(one != expected for one, expected in pairs),
        "lost_tokens": sum(max(0, len(expected) - len(one)) for one, expected in pairs),
        "repeated_tokens": sum(max(0, len(one) - len(expected)) for one, expected in pairs),
    }
