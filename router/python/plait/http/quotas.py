"""What each key uses now, and the bounds that its line of the key file sets: requests under way, requests and
tokens of a minute.

Use is counted by key and outlives a change of the file: a key with a new bound has it from its next request on.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from starlette.types import Scope

from plait.http.errors import ApiError, Headers
from plait.http.identity import KEY
from plait.http.key_terms import KeyTerms
from plait.http.streams import OnUsed, Used

WINDOW_SECONDS = 60.0
_MAX_RETRY_SECONDS = 60
_GRAIN_SECONDS = 1.0
_NEWEST = 0.25
"""Weight of the newest request in the mean of their times."""
Clock = Callable[[], float]


class OverQuotaError(ApiError):
    """A key is at a bound; it says which, and when to come back."""

    def __init__(self, message: str, retry_after_seconds: int) -> None:
        super().__init__(429, message, code="rate_limit_exceeded")
        self.headers: Headers = [(b"retry-after", b"%d" % retry_after_seconds)]


class _Use:
    """One key's."""

    def __init__(self) -> None:
        self.num_running = 0
        self.begun: deque[float] = deque()
        """Times of the last minute."""
        self.tokens: deque[tuple[float, int]] = deque()
        """Those of requests that ended in the last minute, summed over `_GRAIN_SECONDS` and counted from their last."""
        self.mean_seconds = 0.0
        """Of a request that ran to its end."""

    def admit(self, terms: KeyTerms, now: float) -> None:
        """Count a request that begins; raises `OverQuotaError` at a bound, and counts nothing."""
        self._check_running(terms.max_running)
        self._check_requests(terms.requests_per_minute, now)
        self._check_tokens(terms.tokens_per_minute, now)
        self.num_running += 1
        if terms.requests_per_minute is not None:
            self.begun.append(now)

    def end(self, seconds: float) -> None:
        self.num_running -= 1
        self.mean_seconds += (seconds - self.mean_seconds) * (_NEWEST if self.mean_seconds else 1.0)

    def _check_running(self, most: int | None) -> None:
        if most is None or self.num_running < most:
            return
        message = (
            f"this API key has {_requests(self.num_running)} under way, where max_running={most} is its bound; send "
            "the next when one has ended"
        )
        raise OverQuotaError(message, _retry_seconds(self.mean_seconds / self.num_running))

    def _check_requests(self, most: int | None, now: float) -> None:
        while self.begun and self.begun[0] <= now - WINDOW_SECONDS:
            self.begun.popleft()
        if most is None or len(self.begun) < most:
            return
        message = (
            f"this API key has begun {_requests(len(self.begun))} within a minute, where requests_per_minute={most} is "
            "its bound; wait as Retry-After says"
        )
        raise OverQuotaError(message, _retry_seconds(self.begun[-most] + WINDOW_SECONDS - now))

    def count_tokens(self, num: int, now: float) -> None:
        """Add those of a request that has ended."""
        if self.tokens and now - self.tokens[-1][0] < _GRAIN_SECONDS:
            num += self.tokens.pop()[1]
        self.tokens.append((now, num))

    def _check_tokens(self, most: int | None, now: float) -> None:
        while self.tokens and self.tokens[0][0] <= now - WINDOW_SECONDS:
            self.tokens.popleft()
        used = sum(num for _, num in self.tokens)
        if most is None or used < most:
            return
        message = (
            f"this API key's requests that ended within a minute took {used} tokens, where tokens_per_minute={most} is "
            "its bound; wait as Retry-After says"
        )
        raise OverQuotaError(message, _retry_seconds(self._when_below(most, used) + WINDOW_SECONDS - now))

    def _when_below(self, most: int, used: int) -> float:
        """When those tokens were counted that must leave the minute until it has less than `most`."""
        left = used - most
        for time_counted, num in self.tokens:
            left -= num
            if left < 0:
                return time_counted
        return self.tokens[-1][0]


class Quotas:
    """The use of all keys."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[bytes, _Use] = {}

    @contextlib.contextmanager
    def request(self, scope: Scope) -> Iterator[OnUsed | None]:
        """Counts a request for the time of the block; raises `OverQuotaError` if its key is at a bound.

        Yields who is to be told of the request's tokens; None if nobody counts them.
        """
        terms = KeyTerms.of(scope)
        if KEY not in scope or not terms.has_bounds:
            yield None
            return
        use = self._uses.setdefault(scope[KEY], _Use())
        began = self._clock()
        use.admit(terms, began)
        try:
            yield partial(self._count_tokens, use) if terms.tokens_per_minute is not None else None
        finally:
            use.end(self._clock() - began)

    def _count_tokens(self, use: _Use, used: Used) -> None:
        use.count_tokens(used.num_prompt_tokens + used.num_output_tokens, self._clock())


def _requests(num: int) -> str:
    return "1 request" if num == 1 else f"{num} requests"


def _retry_seconds(seconds: float) -> int:
    return max(1, min(_MAX_RETRY_SECONDS, math.ceil(seconds)))
