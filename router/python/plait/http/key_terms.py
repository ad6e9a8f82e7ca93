"""What the key file grants a key: its weight under fair share, and the best priority that it may ask for.

A line of the file is a key, then any of `weight=N` and `priority=N`: `sk-1234 weight=4 priority=0`. A line that begins
with `#` is a comment.
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

    def granted(self) -> Iterator[str]:
        """The names of the terms that are not the defaults."""
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


def parse_line(line: str) -> tuple[str, KeyTerms]:
    """The key of a line and its terms; raises `ValueError` that says what is wrong."""
    if line.startswith(tuple(f"{name}=" for name in READERS)):
        raise ValueError(f"`{line}` but no key; write the key before its terms")
    if _COMMENT.search(line):
        raise ValueError("a `#` after a space, which may be a comment or a key's; write comments on lines of their own")
    terms: dict[str, str] = {}
    while len(words := line.rsplit(None, 1)) == 2 and (match := _TERM.fullmatch(words[1])) is not None:
        line, (name, value) = words[0], match.groups()
        if name not in READERS:
            raise ValueError(f"`{name}=`, where a key may have {' and '.join(f'`{it}=N`' for it in READERS)} after it")
        if name in terms:
            raise ValueError(f"`{name}` twice; give it once")
        terms[name] = value
    try:
        # msgspec would take `null` for a number that is not given, which caps no priority.
        numbers = {name: int(value) if _WHOLE.fullmatch(value) else value for name, value in terms.items()}
        return line, msgspec.convert(numbers, KeyTerms)
    except msgspec.ValidationError as error:
        given = ", ".join(f"{name}={value}" for name, value in terms.items())
        raise ValueError(
            f"`{given}`, where weight is a whole number from 1 to 1000 and priority one of 32 bits; mend or remove it"
        ) from error
