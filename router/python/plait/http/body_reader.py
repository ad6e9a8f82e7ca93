"""What the readers of all bodies share: from bytes to a typed body, and checks that no type states."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from plait.http.body_errors import explain, field_error, shown
from plait.http.errors import ApiError
from plait.http.unsupported import Neutral, check_supported
from plait.http.whole_numbers import decode_struct

MAX_DEPTH = 16
"""Nesting of free-form values: tool calls and template arguments."""
MAX_SCHEMA_DEPTH = 64
"""Nesting of tools and documents."""
MAX_CONTAINERS = 131_072
"""Objects and lists in a body. A body of 8 MiB has room for millions, and reading them would hold up all others."""
_OTHERS = bytes(set(range(256)) - set(b'"[{'))
_WIDEST = range(-(1 << 63), 1 << 64)
"""Integers that serde_json reads as such."""

Body = TypeVar("Body", bound=msgspec.Struct)
Value = TypeVar("Value")
Fields = dict[str, msgspec.Raw]
ServedNames = tuple[str, ...]
"""The names of the served model; the first is given back to a request without one."""


def decode(raw: bytes, kind: type[Body], unsupported: Neutral) -> Body:
    """The typed body, after its top-level names were checked against the unsupported ones; raises `ApiError`."""
    return decode_with_fields(raw, kind, unsupported)[0]


def decode_with_fields(raw: bytes, kind: type[Body], unsupported: Neutral) -> tuple[Body, Fields]:
    """The typed body, and its fields as they came."""
    _check_containers(raw)
    try:
        fields = _fields(raw)
        check_supported(fields, unsupported)
        return _decode_body(raw, fields, kind), fields
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body of {len(raw)} bytes is not valid JSON: {error}; correct it") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply; send plain messages or prompts") from None


def _check_containers(raw: bytes) -> None:
    """Reject what has too many objects and lists; those within texts are none."""
    if _num_openings(raw) > MAX_CONTAINERS and _num_openings(_outside_texts(raw)) > MAX_CONTAINERS:
        raise ApiError(400, f"the body has over {MAX_CONTAINERS} objects and lists, which is the limit; send fewer")


def _num_openings(raw: bytes) -> int:
    return raw.count(b"{") + raw.count(b"[")


def _outside_texts(raw: bytes) -> bytes:
    """The openings that are in no text; few passes in C, as the body may be hostile."""
    marks = raw.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS).replace(b'""', b"")
    return b"".join(marks.split(b'"')[::2])


def _fields(raw: bytes) -> Fields:
    try:
        return msgspec.json.decode(raw, type=Fields)
    except msgspec.ValidationError as error:
        raise ApiError(400, f'the body is not a JSON object: {error}; send one, like {{"messages": [...]}}') from None


def _decode_body(raw: bytes, fields: Fields, kind: type[Body]) -> Body:
    try:
        return decode_struct(raw, kind)
    except msgspec.ValidationError as error:
        raise explain(str(error), fields) from None


def given(param: str, name: str, value: Value | None) -> Value:
    """A field that must be there; raises `ApiError`."""
    if value is None:
        raise field_error(f"{param}.{name}", "is missing; send it")
    return value


def served_name(asked: str | None, served: ServedNames) -> str:
    """The name to give back. A body without `model` is taken, as vLLM does: there is only one model to mean."""
    if asked is None:
        return served[0]
    if asked not in served:
        names = " or ".join(repr(name) for name in served)
        raise ApiError(
            404,
            f"`model` is {asked[:256]!r}, where this server serves {names}; send that or leave it out",
            param="model",
            code="model_not_found",
        )
    return asked


def check_free_form(param: str, value: object, depth: int = MAX_DEPTH) -> None:
    """Reject what the engine's JSON reader does not take."""
    if isinstance(value, int) and not _WIDEST.start <= value < _WIDEST.stop:
        problem = "where numbers of at most 64 bits are allowed; send it as a text"
        raise field_error(param, f"has the number {shown(msgspec.Raw(str(value).encode()))}, {problem}")
    if not isinstance(value, dict | list):
        return
    if depth == 0:
        raise field_error(param, "is nested deeper than is allowed; flatten it")
    for inner in value.values() if isinstance(value, dict) else value:
        check_free_form(param, inner, depth - 1)
