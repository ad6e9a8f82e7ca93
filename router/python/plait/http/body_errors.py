"""Errors about a body's types: what was given, what is allowed and what to do, from msgspec's sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from plait.http.bodies import CHOICES
from plait.http.errors import ApiError

UNSUPPORTED = "unsupported_value"
"""What the API has and this server has not."""
INVALID = "invalid_value"

_MESSAGE = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_STEP = re.compile(r"\[(?P<index>[^\]]*)\]|(?P<name>[^.\[]+)")
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_MAX_SHOWN = 64
"""Characters of a value in a message."""
_MAX_NAME = 256
"""Characters of a field's name: objects of any names may be in it."""


class _Spot(NamedTuple):
    """A place in a body: its path, and the value there if it was found."""

    path: str
    given: str | None


def shown(raw: msgspec.Raw) -> str:
    """A value as the client wrote it, cut to 64 characters."""
    text = bytes(raw).decode(errors="replace")
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def field_error(param: str, problem: str, code: str = INVALID) -> ApiError:
    """A 400 for the field `param`, cut to what a reader needs; `problem` goes on after its name."""
    if len(param) > _MAX_NAME:
        param = f"{param[:_MAX_NAME]}..."
    return ApiError(400, f"`{param}` {problem}", param=param, code=code)


def explain(message: str, fields: Mapping[str, msgspec.Raw]) -> ApiError:
    """msgspec's `message` about a body with these `fields`, as the error that the client reads."""
    match = _MESSAGE.fullmatch(message)
    what, path = (match["what"], match["path"] or "") if match else (message, "")
    if missing := re.search(r"missing required field `([^`]+)`", what):
        return field_error(f"{path}.{missing[1]}".lstrip("."), "is missing; send it")
    spot = _find(path, fields)
    given = f"is {spot.given}, where" if spot.given is not None else "is not read:"
    return field_error(spot.path, f"{given} {_advice(what, path)}")


def _advice(what: str, path: str) -> str:
    """What is allowed at `path` and what to do, from msgspec's sentence without its path."""
    if what.startswith("Invalid enum value"):
        return f"one of {', '.join(CHOICES[path.rpartition('.')[2]])} is allowed; send one of these"
    if limit := re.fullmatch(r"Expected `str` of length (<=|>=) (\d+)", what):
        length = f"at most {limit[2]} characters" if limit[1] == "<=" else f"{limit[2]} or more characters"
        return f"a text of {length} is allowed; send that or leave it out"
    if expected := re.fullmatch(r"Expected `([^`]+)`, got `[^`]+`", what):
        names = expected[1].split(" | ")
        allowed = " or ".join(_TYPES.get(name, name) for name in names if name != "null")
        return f"{allowed} is allowed; send that" + (" or leave it out" if "null" in names else "")
    if re.match(r"Expected `int` [<>]=|(Number|Integer value) out of range", what):
        return "numbers of at most 64 bits are allowed; send a smaller one or leave it out"
    return f"{what[0].lower()}{what[1:]}; correct it or leave it out"


def _find(path: str, fields: Mapping[str, msgspec.Raw]) -> _Spot:
    """The value at msgspec's path, which writes `[...]` for an entry of an object of any names."""
    value, named = msgspec.Raw(msgspec.json.encode(fields)), ""
    for step in _STEP.finditer(path):
        try:
            key, value = _enter(step, value)
        except (msgspec.MsgspecError, LookupError):
            return _Spot(path, None)
        named += key
    return _Spot(named.lstrip("."), shown(value))


def _enter(step: re.Match[str], value: msgspec.Raw) -> tuple[str, msgspec.Raw]:
    """The name of a step into `value` and what is there; raises `LookupError` or `MsgspecError` if nothing is."""
    if step["name"] is not None:
        return f".{step['name']}", msgspec.json.decode(value, type=dict[str, msgspec.Raw])[step["name"]]
    if step["index"] != "...":
        return step[0], msgspec.json.decode(value, type=list[msgspec.Raw])[int(step["index"])]
    entries = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
    for name, entry in entries.items():
        if not _is_readable(entry):
            return f".{name}", entry
    raise LookupError(step[0])


def _is_readable(raw: msgspec.Raw) -> bool:
    try:
        msgspec.json.decode(raw)
    except msgspec.MsgspecError:
        return False
    return True
