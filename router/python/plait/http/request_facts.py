"""What the engine tells of a request at its end, for the request's line in the log."""

from __future__ import annotations

import hashlib
import time

import msgspec
from starlette.types import Scope

from plait.http.identity import KEY
from plait.http.key_terms import KeyTerms
from plait.http.request_ids import REQUEST_ID
from plait.http.streams import Caller, OnUsed, Used

MAX_PATH_CHARACTERS = 256

_FACTS = "plait.request_facts"


class RequestFacts(msgspec.Struct):
    """Filled in while a request is answered."""

    used: Used | None = None
    """None: nothing was generated, or the client left before the engine's end."""

    def take(self, used: Used) -> None:
        self.used = used

    def shown(self) -> str:
        """As fields of the log's line."""
        if self.used is None:
            return "prompt_tokens=- output_tokens=- reason=-"
        used = self.used
        return f"prompt_tokens={used.num_prompt_tokens} output_tokens={used.num_output_tokens} reason={used.reason}"


def collect_facts(scope: Scope) -> RequestFacts:
    """Facts that `also_told` fills in, further in."""
    scope[_FACTS] = facts = RequestFacts()
    return facts


def key_name(scope: Scope) -> str:
    """The key's name, or the beginning of its SHA-256; empty without a key."""
    return KeyTerms.of(scope).name or (hashlib.sha256(scope[KEY]).hexdigest()[:8] if KEY in scope else "")


def caller_of(scope: Scope) -> Caller:
    """Whose request it is, for operators."""
    request = scope.get(REQUEST_ID, b"").decode()
    path = scope["path"][:MAX_PATH_CHARACTERS]
    return Caller(id=request, path=path, key=key_name(scope), began=time.monotonic())


def also_told(scope: Scope, on_used: OnUsed | None) -> OnUsed | None:
    """`on_used`, and the request's facts if they are collected."""
    facts: RequestFacts | None = scope.get(_FACTS)
    if facts is None or on_used is None:
        return on_used if facts is None else facts.take

    def tell_both(used: Used) -> None:
        facts.take(used)
        on_used(used)

    return tell_both
