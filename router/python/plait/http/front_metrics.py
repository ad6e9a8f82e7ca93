"""Metrics that the front door counts itself: answers, what each key took, and how late the event loop is."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from plait.http.answers import Answer
from plait.http.request_facts import RequestFacts, key_name
from plait.http.streams import Used

_OTHER = "other"
MAX_KEYS = 1024
"""Names of keys that are counted one by one, of all that the file ever had."""
_LAG_PERIOD_SECONDS = 0.1
_FIRST_LAG_SECONDS = 0.001
_NUM_LAG_BUCKETS = 14


class KeyUse(msgspec.Struct):
    """What the requests of a key took that have ended."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


class FrontMetrics:
    """Counts; its `end_request` is told of each answer."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._patterns: list[tuple[re.Pattern[str], str]] = []
        self._answers: Counter[tuple[str, str]] = Counter()
        self._keys: dict[str, KeyUse] = {}
        self._lags = [0] * (_NUM_LAG_BUCKETS + 1)
        self._lag_seconds = 0.0

    def know(self, routes: Iterable[BaseRoute]) -> None:
        """Tell the paths of these routes apart; all others are one."""
        known = [route for route in routes if isinstance(route, Route)]
        self._paths |= {route.path for route in known if "{" not in route.path}
        self._patterns += [(route.path_regex, _plain(route.path)) for route in known if "{" in route.path]

    def end_request(self, scope: Scope, facts: RequestFacts, answer: Answer) -> None:
        self.count_answer(self._path(scope["path"]), str(answer.status or "none"))

    def end_use(self, scope: Scope, used: Used) -> None:
        """The engine has told what a request took; without a key it is counted nowhere."""
        if name := key_name(scope):
            self.count_use(name, used)

    def count_answer(self, path: str, status: str) -> None:
        self._answers[path, status] += 1

    def count_use(self, name: str, used: Used) -> None:
        name = name if name in self._keys or len(self._keys) < MAX_KEYS else _OTHER
        use = self._keys.setdefault(name, KeyUse())
        use.num_requests += 1
        use.num_prompt_tokens += used.num_prompt_tokens
        use.num_output_tokens += used.num_output_tokens

    def count_lag(self, seconds: float) -> None:
        ends = (bucket for bucket in range(_NUM_LAG_BUCKETS) if seconds <= _end(bucket))
        self._lags[next(ends, _NUM_LAG_BUCKETS)] += 1
        self._lag_seconds += seconds

    async def watch_lag(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.monotonic() + _LAG_PERIOD_SECONDS
            await asyncio.sleep(_LAG_PERIOD_SECONDS)
            self.count_lag(max(0.0, time.monotonic() - due))

    def text(self, *, with_keys: bool) -> bytes:
        """OpenMetrics text, without its end. What each key took is for operators, not for holders of other keys."""
        lines = [*self._answer_lines(), *self._lag_lines(), *(self._key_lines() if with_keys else ())]
        return ("\n".join(lines) + "\n").encode()

    def _path(self, path: str) -> str:
        if path in self._paths:
            return path
        return next((name for pattern, name in self._patterns if pattern.match(path)), _OTHER)

    def _answer_lines(self) -> Iterator[str]:
        help_text = "Answers of the front door by the API's path and HTTP status; none: the client left before its head"
        yield from _head("plait_http_answers", "counter", help_text)
        for (path, status), num in sorted(self._answers.items()):
            yield f'plait_http_answers_total{{path="{path}",status="{status}"}} {num}'

    def _lag_lines(self) -> Iterator[str]:
        name = "plait_event_loop_lag_seconds"
        help_text = "How much later than asked for the front door's event loop wakes, ten times a second"
        yield from _head(name, "histogram", help_text)
        num = 0
        for bucket, count in enumerate(self._lags):
            num += count
            end = "+Inf" if bucket == _NUM_LAG_BUCKETS else f"{_end(bucket):g}"
            yield f'{name}_bucket{{le="{end}"}} {num}'
        yield f"{name}_sum {self._lag_seconds:.6f}"
        yield f"{name}_count {num}"

    def _key_lines(self) -> Iterator[str]:
        keys = sorted(self._keys.items())
        help_text = "Requests of each API key that the engine served, by its name or hash; on the admin listener alone"
        yield from _head("plait_key_requests", "counter", help_text)
        for name, use in keys:
            yield f'plait_key_requests_total{{key="{name}"}} {use.num_requests}'
        help_text = "Tokens of each API key's requests that ended; on the admin listener alone"
        yield from _head("plait_key_tokens", "counter", help_text)
        for name, use in keys:
            yield f'plait_key_tokens_total{{key="{name}",of="prompt"}} {use.num_prompt_tokens}'
            yield f'plait_key_tokens_total{{key="{name}",of="output"}} {use.num_output_tokens}'


def _head(name: str, kind: str, help_text: str) -> tuple[str, str]:
    return f"# HELP {name} {help_text}.", f"# TYPE {name} {kind}"


def _end(bucket: int) -> float:
    """Seconds at which a bucket ends."""
    return _FIRST_LAG_SECONDS * 2.0**bucket


def _plain(path: str) -> str:
    """`/v1/models/{model}` for the route with `{model:path}`."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)
