"""``schema.txt``, whose bytes are in the handshake, says what the structs say."""

from __future__ import annotations

import hashlib
from importlib import resources

import msgspec
import pytest
from msgspec import inspect
from plait_proto import SCHEMA_FINGERPRINT, Kind, config_fingerprint, messages

SCHEMA = (resources.files("plait_proto") / "schema.txt").read_text(encoding="utf-8")
HEADERS = {"Plan": "PlanHeader", "StepResult": "ResultHeader", "StepMasks": "MasksHeader"}


def sections() -> dict[str, list[str]]:
    """Lines under each heading of the schema, indentation removed."""
    blocks = [block.splitlines() for block in SCHEMA.strip().split("\n\n")]
    return {heading: [line.removeprefix("  ") for line in lines] for heading, *lines in blocks}


def struct_named(name: str) -> type[msgspec.Struct]:
    struct: type = vars(messages)[name]
    assert issubclass(struct, msgspec.Struct)
    return struct


def schema_type(kind: inspect.Type) -> str:
    """What the schema calls a field's type."""
    match kind:
        case inspect.IntType(ge=0, le=4294967295) | inspect.EnumType():
            return "u32"
        case inspect.IntType(ge=0, le=None):
            return "u64"
        case inspect.BytesType(min_length=16, max_length=16):
            return "bin16"
        case inspect.BytesType(min_length=None, max_length=None):
            return "bin"
        case inspect.StrType():
            return "str"
        case inspect.FloatType(ge=None, le=None):
            return "f64"
        case inspect.BoolType():
            return "bool"
        case inspect.StructType():
            return kind.cls.__name__
        case inspect.VarTupleType():
            return f"array of {schema_type(kind.item_type)}"
        case inspect.UnionType(types=(wanted, inspect.NoneType())):
            return f"{schema_type(wanted)} or nil"
        case _:
            raise TypeError(f"the schema has no name for {kind}")


def wire_fields(name: str) -> list[str]:
    info = inspect.type_info(struct_named(name))
    assert isinstance(info, inspect.StructType)
    assert info.array_like
    assert not info.forbid_unknown_fields
    return [
        f"{field.name} {schema_type(field.type)}" + ("" if field.required else ", optional") for field in info.fields
    ]


@pytest.mark.parametrize("heading", sections())
def test_the_schema_lists_the_fields_and_their_types(heading: str) -> None:
    name = heading.partition(" = ")[0]
    listed = [line for line in sections()[heading] if not line.startswith("frame ")]
    assert wire_fields(HEADERS.get(name, name)) == listed


@pytest.mark.parametrize("heading", ["Plan = 3", "StepResult = 4", "StepMasks = 14"])
def test_the_schema_lists_the_frames_after_the_header(heading: str) -> None:
    name = heading.partition(" = ")[0]
    listed = [line.split(":")[0] for line in sections()[heading] if line.startswith("frame ")]
    fields, in_header = struct_named(name).__struct_fields__, struct_named(HEADERS[name]).__struct_fields__
    arrays = [field for field in fields if field not in in_header]
    assert [f"frame {index} {field}" for index, field in enumerate(arrays, start=2)] == listed
    assert set(in_header) <= set(fields)


def test_the_schema_lists_every_kind_with_its_byte() -> None:
    headings = [heading for heading in sections() if " = " in heading]
    kinds = [f"{kind.name.title().replace('_', '')} = {kind.value}" for kind in Kind]
    assert headings == kinds


def test_a_fingerprint_is_the_start_of_sha_256() -> None:
    assert config_fingerprint(b"abc").hex() == "ba7816bf8f01cfea414140de5dae2223"
    assert hashlib.sha256(SCHEMA.encode()).digest()[:16] == SCHEMA_FINGERPRINT
