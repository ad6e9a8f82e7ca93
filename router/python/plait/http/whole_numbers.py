"""Whole numbers that a client writes as 3.0: JSON Schema's integers, and what vLLM takes.

msgspec takes `3` alone. Only a body that it refuses for such a number is read again, so that no other one pays.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TypeAlias, TypeVar

import msgspec
from msgspec import inspect

_Fields: TypeAlias = dict[str, msgspec.Raw]
_Numbers = int | list[int | list[int]]
_REFUSED = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_NUMBERS = re.compile(rb"[-+.\deE\s\[\],]+")
_NO_TEXTS = re.compile(rb'[^"{]*')
_POINTED = re.compile(rb"(?<=[\[,\s])(-?\d+)\.0+(?=[\],\s])")
_MOST_MENDED = 1024
"""Numbers before the one that an error names: a hostile body has millions."""
Struct = TypeVar("Struct", bound=msgspec.Struct)


def decode_struct(raw: bytes, kind: type[Struct]) -> Struct:
    """msgspec's decoding, which takes 3.0 for 3; raises msgspec's errors."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        if not _REFUSED.match(str(error)):
            raise
    fields = _with_whole_numbers(msgspec.json.decode(raw, type=_Fields), kind)
    return msgspec.json.decode(msgspec.json.encode(fields), type=kind)


def _with_whole_numbers(fields: _Fields, kind: type[msgspec.Struct]) -> _Fields:
    """The fields of a `kind` with 3 for 3.0 where whole numbers belong, and all else as it came."""
    kinds = _integer_fields(kind)
    return {name: _whole(raw, kinds[name]) if name in kinds else raw for name, raw in fields.items()}


@cache
def _integer_fields(kind: type[msgspec.Struct]) -> dict[str, inspect.Type]:
    """By their names in JSON."""
    told = inspect.type_info(kind)
    fields = told.fields if isinstance(told, inspect.StructType) else ()
    return {field.encode_name: field.type for field in fields if _has_integers(field.type)}


def _has_integers(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.StructType):
        return bool(_integer_fields(kind.cls))
    if isinstance(kind, inspect.ListType):
        return _has_integers(kind.item_type)
    return isinstance(kind, inspect.IntType) or any(_has_integers(option) for option in _options(kind))


def _options(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else ()


def _whole(raw: msgspec.Raw, kind: inspect.Type) -> msgspec.Raw:
    """A value that has no such number alone stays, for the decoder to say what is wrong with it."""
    try:
        if _NUMBERS.fullmatch(raw):
            return _encoded(msgspec.json.decode(raw, type=_Numbers, strict=False))
        for option in _options(kind):
            if isinstance(option, inspect.StructType) and _has_integers(option):
                return _encoded(_with_whole_numbers(msgspec.json.decode(raw, type=_Fields), option.cls))
    except msgspec.MsgspecError:
        pass
    return _named(raw)


def _named(raw: msgspec.Raw) -> msgspec.Raw:
    """A list that is refused, with 3 for 3.0: the error names the number that is none."""
    if not _NO_TEXTS.fullmatch(raw):
        return raw
    return msgspec.Raw(_POINTED.sub(rb"\1", bytes(raw), _MOST_MENDED))


def _encoded(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
