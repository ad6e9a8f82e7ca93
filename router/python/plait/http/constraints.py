"""What a body constrains its answer to: OpenAI's, vLLM's and SGLang's names for the same, as one constraint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from plait.http.bodies import ConstraintFields, ResponseFormat, StructuredOutputs
from plait.http.body_errors import UNSUPPORTED, field_error, shown

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]
_OUTPUTS: dict[str, Kind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Fields of `structured_outputs`, but for `json_object`."""
_ALIASES: dict[str, Kind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
"""Older names of vLLM, and SGLang's."""


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """One constraint, as `plait-openai` reads it."""

    param: str
    """The field that the client used."""
    constraint: Kind
    text: str = ""
    """A schema or structural tag as JSON, a regular expression or a grammar."""
    texts: list[str] = []
    """Of a choice."""
    is_compact: bool = False
    """JSON without spaces."""
    whitespace_pattern: str | None = None
    """What JSON may have between its tokens: a regular expression."""


class _Spaces(msgspec.Struct, frozen=True, kw_only=True):
    """Where JSON may have spaces: wherever the model likes, unless one of these says otherwise."""

    is_compact: bool = False
    pattern: str | None = None


_ANY_SPACES = _Spaces()


def constraint_of(body: ConstraintFields) -> Constraint | None:
    """The body's constraint; raises `ApiError` if it has several."""
    given = [*_response_format(body.response_format), *_structured_outputs(body.structured_outputs)]
    spaces = _Spaces(pattern=body.guided_whitespace_pattern)
    for name, kind in _ALIASES.items():
        given += _constraint(name, kind, getattr(body, name), spaces)
    if len(given) > 1:
        problem = f"is given beside `{given[0].param}`, where one constraint is allowed; leave one out"
        raise field_error(given[1].param, problem)
    if spaces.pattern is not None and not (given and given[0].whitespace_pattern == spaces.pattern):
        problem = "is given, and `guided_json` is not; send it with the schema whose spaces it is for, or leave it out"
        raise field_error("guided_whitespace_pattern", problem)
    return given[0] if given else None


def schema_constraint(param: str, schema: msgspec.Raw) -> Constraint:
    """JSON that this schema validates; raises `ApiError` if it is missing."""
    if not _is_given(schema):
        raise field_error(param, "is missing; send the schema")
    return _json_schema(param, _json_text(param, schema), _ANY_SPACES)


def _response_format(asked: ResponseFormat | None) -> Iterator[Constraint]:
    if asked is None or asked.type == "text":
        return
    if asked.type == "json_object":
        yield Constraint(param="response_format", constraint="json_object")
    elif asked.type == "structural_tag":
        yield Constraint(param="response_format", constraint="structural_tag", text=msgspec.json.encode(asked).decode())
    elif asked.json_schema is None or not _is_given(asked.json_schema.schema):
        problem = "is missing; send the schema, or `response_format.type`: 'json_object'"
        raise field_error("response_format.json_schema.schema", problem)
    else:
        yield from _constraint("response_format.json_schema.schema", "json_schema", asked.json_schema.schema)


def _structured_outputs(asked: StructuredOutputs | None) -> Iterator[Constraint]:
    if asked is None:
        return
    if asked.disable_additional_properties:
        problem = "is not supported by this server; leave it out, and say `additionalProperties` in the schema"
        raise field_error("structured_outputs.disable_additional_properties", problem, code=UNSUPPORTED)
    given: list[Constraint] = []
    spaces = _Spaces(is_compact=bool(asked.disable_any_whitespace), pattern=asked.whitespace_pattern)
    if spaces.is_compact and spaces.pattern is not None:
        problem = "is given beside `structured_outputs.disable_any_whitespace`; leave one out"
        raise field_error("structured_outputs.whitespace_pattern", problem)
    for name, kind in _OUTPUTS.items():
        given += _constraint(f"structured_outputs.{name}", kind, getattr(asked, name), spaces)
    if asked.json_object:
        given += _json_object("structured_outputs.json_object", spaces)
    if not given:
        raise field_error("structured_outputs", f"has none of {', '.join(_OUTPUTS)} and json_object; send one of them")
    yield from given


def _json_object(param: str, spaces: _Spaces) -> Iterator[Constraint]:
    if spaces == _ANY_SPACES:
        yield Constraint(param=param, constraint="json_object")
    else:
        yield _json_schema(param, '{"type": "object"}', spaces)


def _json_schema(param: str, text: str, spaces: _Spaces) -> Constraint:
    return Constraint(
        param=param,
        constraint="json_schema",
        text=text,
        is_compact=spaces.is_compact,
        whitespace_pattern=spaces.pattern,
    )


def _constraint(
    param: str, kind: Kind, value: msgspec.Raw | str | list[str] | None, spaces: _Spaces = _ANY_SPACES
) -> Iterator[Constraint]:
    if isinstance(value, msgspec.Raw):
        if not _is_given(value):
            return
        text = _json_text(param, value)
        if kind == "json_schema":
            yield _json_schema(param, text, spaces)
        else:
            yield Constraint(param=param, constraint=kind, text=text)
    elif isinstance(value, list):
        yield Constraint(param=param, constraint=kind, texts=value)
    elif value is not None:
        yield Constraint(param=param, constraint=kind, text=value)


def _is_given(raw: msgspec.Raw) -> bool:
    return bytes(raw) not in (b"", b"null")


def _json_text(param: str, raw: msgspec.Raw) -> str:
    """JSON as the client wrote it; a text holds it once more encoded."""
    try:
        text = bytes(raw).decode()
        return str(msgspec.json.decode(text, type=str)) if text.startswith('"') else text
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise field_error(param, f"is {shown(raw)}, which is no JSON; correct it") from None
