"""What the key file grants a key: its share under fair share, the best priority that it may ask for, and its bounds.

A line of the file is a key, then its terms in any order: `sk-1234 name=search max_running=8`. A line that begins with
`#` is a comment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.types import Scope

from plait.http.api import GenerateRequest
from plait.http.body_errors import field_error
from plait.settings import Policy

TERMS = "plait.key_terms"
"""The scope's entry in which `RequireKey` leaves the accepted key's terms."""

READERS: dict[str, tuple[Policy, ...]] = {"weight": ("fair",), "priority": ("priority", "fair")}
"""The policies that read a term."""

_Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._-]{1,64}\Z")]
# A time is kept for each request of a minute.
_Bound = Annotated[int, Meta(ge=1, le=100_000)]
_TokenBound = Annotated[int, Meta(ge=1, le=1_000_000_000)]
_I32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
_TERM = re.compile(r"(\w+)=(.*)")
_COMMENT = re.compile(r"\s#")
_WHOLE = re.compile(r"-?\d{1,10}")


class KeyTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a key is granted."""

    weight: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Its share against others' with `--policy fair`."""
    priority: _I32 | None = None
    """The smallest `priority` of its requests, and that of requests without one if it is larger than 0."""

    @classmethod
    def of(cls, scope: Scope) -> KeyTerms:
        """The accepted key's; the defaults if the server asks for none."""
        terms: KeyTerms = scope.get(TERMS, _DEFAULTS)
        return terms

    name: _Name | None = None
    """What the log calls the key."""
    max_running: _Bound | None = None
    """Its requests under way."""
    requests_per_minute: _Bound | None = None
    tokens_per_minute: _TokenBound | None = None
    """Of prompts and outputs."""

    @property
    def has_bounds(self) -> bool:
        """Whether its use is counted."""
        bounds = (self.max_running, self.requests_per_minute, self.tokens_per_minute)
        return any(bound is not None for bound in bounds)

    def granted(self) -> Iterator[str]:
        """The names of the terms that a policy reads and that are not the defaults."""
        if self.weight != 1:
            yield "weight"
        if self.priority is not None:
            yield "priority"

    def apply(self, request: GenerateRequest) -> GenerateRequest:
        """The request with its key's weight; raises `ApiError` if its priority is not granted."""
        priority, best = request.priority, self.priority
        if best is not None and priority < best:
            if priority != 0:
                allowed = f"where this API key may ask for {best} or more; send {best}, or leave it out"
                raise field_error("priority", f"is {priority}, {allowed}")
            priority = best
        if (priority, self.weight) == (request.priority, 1):
            return request
        return msgspec.structs.replace(request, priority=priority, weight=self.weight)


_DEFAULTS = KeyTerms()
NAMES = KeyTerms.__struct_fields__
_ALLOWED = (
    "name is 1 to 64 letters, digits and ._-, weight a whole number from 1 to 1000, priority one of 32 bits, "
    "max_running and requests_per_minute are from 1 to 100000, and tokens_per_minute is from 1 to 1000000000"
)


def parse_line(line: str) -> tuple[str, KeyTerms]:
    """The key of a line and its terms; raises `ValueError` that says what is wrong."""
    if line.startswith(tuple(f"{name}=" for name in NAMES)):
        raise ValueError(f"`{line}` but no key; write the key before its terms")
    if _COMMENT.search(line):
        raise ValueError("a `#` after a space, which may be a comment or a key's; write comments on lines of their own")
    terms: dict[str, str] = {}
    while len(words := line.rsplit(None, 1)) == 2 and (match := _TERM.fullmatch(words[1])) is not None:
        line, (name, value) = words[0], match.groups()
        if name not in NAMES:
            raise ValueError(f"`{name}=`, where a key may have {', '.join(f'`{it}=`' for it in NAMES)} after it")
        if name in terms:
            raise ValueError(f"`{name}` twice; give it once")
        terms[name] = value
    try:
        return line, msgspec.convert({name: _value(name, text) for name, text in terms.items()}, KeyTerms)
    except msgspec.ValidationError as error:
        given = ", ".join(f"{name}={value}" for name, value in terms.items())
        raise ValueError(f"`{given}`, where {_ALLOWED}; mend or remove it") from error


def _value(name: str, text: str) -> str | int:
    """msgspec would take `null` for a number that is not given, which caps no priority."""
    return int(text) if name != "name" and _WHOLE.fullmatch(text) else text
