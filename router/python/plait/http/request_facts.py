"""What the engine tells of a request at its end, for the request's line in the log."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import partial

import msgspec
from starlette.types import Scope

from plait.http.api import GenerateRequest
from plait.http.identity import KEY
from plait.http.key_terms import KeyTerms
from plait.http.request_ids import REQUEST_ID
from plait.http.streams import Caller, OnUsed, Used
from plait.log import Field

MAX_PATH_CHARACTERS = 256

_FACTS = "plait.request_facts"


OnUse = Callable[[Scope, Used], None]


class RequestFacts(msgspec.Struct):
    """Filled in while a request is answered."""

    used: Used | None = None
    """None: nothing was generated, or the client left before the engine's end."""
    model: str | None = None
    """As asked for; None: the request did not come to the engine."""
    is_streamed: bool = False
    submitted_ns: int = 0
    """When the engine got it, since the epoch."""
    tell: OnUsed | None = None
    """Called with `used` as well, maybe after the answer has ended."""

    def take(self, used: Used) -> None:
        self.used = used
        if self.tell is not None:
            self.tell(used)

    def fields(self) -> dict[str, Field]:
        """For the log's line."""
        used = self.used
        return {
            "prompt_tokens": used.num_prompt_tokens if used else None,
            "output_tokens": used.num_output_tokens if used else None,
            "reason": used.reason if used else None,
        }


def collect_facts(scope: Scope, on_use: OnUse | None = None) -> RequestFacts:
    """Facts that `also_told` fills in, further in."""
    tell = partial(on_use, scope) if on_use is not None else None
    scope[_FACTS] = facts = RequestFacts(tell=tell)
    return facts


def key_name(scope: Scope) -> str:
    """The key's name, or the beginning of its SHA-256; empty without a key."""
    return KeyTerms.of(scope).name or (hashlib.sha256(scope[KEY]).hexdigest()[:8] if KEY in scope else "")


def caller_of(scope: Scope) -> Caller:
    """Whose request it is, for operators."""
    request = scope.get(REQUEST_ID, b"").decode()
    path = scope["path"][:MAX_PATH_CHARACTERS]
    return Caller(id=request, path=path, key=key_name(scope), began=time.monotonic())


def also_told(scope: Scope, on_used: OnUsed | None, request: GenerateRequest) -> OnUsed | None:
    """`on_used`, and the request's facts if they are collected. The engine gets the request next."""
    facts: RequestFacts | None = scope.get(_FACTS)
    if facts is None:
        return on_used
    facts.model, facts.is_streamed, facts.submitted_ns = request.model, request.stream, time.time_ns()
    if on_used is None:
        return facts.take

    def tell_both(used: Used) -> None:
        facts.take(used)
        on_used(used)

    return tell_both
