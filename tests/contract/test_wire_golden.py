"""The golden files: what both languages must read and write alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TypeAlias, cast

import msgspec
import pytest
from plait_proto import (
    IS_LAST_CHUNK,
    LOOKAHEAD,
    POOLS_LAST,
    POOLS_MEAN,
    Adjustment,
    Kind,
    Message,
    Plan,
    StepMasks,
    StepResult,
    Words,
    decode,
    encode,
    read_adjustments,
)
from plait_testing.wire_golden import GOLDEN, NAMES, golden_frames

# The golden files keep the names that their messages had when they were written.
GOLDEN_KINDS = {"Decision": "Verdict", "Heartbeat": "Beat"}
GOLDEN_FIELDS = {"decision": "verdict"}
OPTIONAL = {
    "other_kinds": (),
    "graphs": (),
    "slot_state": None,
    "num_snapshots": 0,
    "prompts": None,
    "tokens": b"",
    "facts": (),
    "awaits_masks": False,
    "pooled": b"",
}
PLAN_LISTS = {
    "appended_pages",
    "other_pages",
    "trimmed_slots",
    "adjustments",
    "scored_ids",
    "restored_slots",
    "saved_slots",
    "pooled_slots",
}
PLAN_ROWS = {"num_prefill", "num_decode", "rows", *PLAN_LISTS}

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"


def description(name: str) -> Json:
    read: Json = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    if isinstance(read, dict):
        for name in ("other_kinds", "graphs"):
            # Empty ones before an optional field that is there.
            if read.get(name) == []:
                del read[name]
    return read


def described(message: Message) -> Json:
    """What the ``.json`` says of a message."""
    name = type(message).__name__
    kind = GOLDEN_KINDS.get(name, name)
    match message:
        case Plan():
            return {"kind": kind, **plain(message, drop=PLAN_ROWS), **plan_rows(message)}
        case StepMasks():
            return {"kind": kind, **plain(message, drop={"masked", "new_masks"}), **mask_rows(message)}
        case _:
            return {"kind": kind, **plain(message)}


def plain(struct: msgspec.Struct, drop: frozenset[str] | set[str] = frozenset()) -> dict[str, Json]:
    fields = {name: getattr(struct, name) for name in struct.__struct_fields__ if name not in drop}
    for name, empty in OPTIONAL.items():
        if fields.get(name, empty) == empty:
            fields.pop(name, None)
    return {GOLDEN_FIELDS.get(name, name): plain_value(value) for name, value in fields.items()}


def plain_value(value: object) -> Json:
    match value:
        case msgspec.Struct():
            return plain(value)
        case tuple():
            return [plain_value(item) for item in value]
        case bytes() | memoryview():
            return list(value)
        case str() | int() | float() | None:
            return value
        case _:
            raise TypeError(f"a message holds a {type(value)}")


def plan_rows(plan: Plan) -> dict[str, Json]:
    words = iter(plan.rows)
    prefill: list[Json] = [prefill_row(words) for _ in range(plan.num_prefill)]
    decode: list[dict[str, Json]] = [{"slot": next(words), "start": next(words)} for _ in range(plan.num_decode)]
    for row, length in zip(decode, words, strict=False):
        if length != 1:
            row["length"] = length
    return {
        "prefill": prefill,
        "decode": cast("Json", decode),
        "appended_pages": records(plan.appended_pages, "slot", "page"),
    } | {
        name: listed
        for name, listed in {
            "other_pages": records(plan.other_pages, "kind", "slot", "page"),
            "trimmed_slots": records(plan.trimmed_slots, "kind", "slot", "num_pages"),
            "adjustments": [adjustment(it) for it in read_adjustments(memoryview(plan.adjustments))],
            "scored_ids": records(plan.scored_ids, "slot", "id"),
            "restored_slots": records(plan.restored_slots, "slot", "snapshot"),
            "saved_slots": records(plan.saved_slots, "slot", "position", "snapshot"),
            "pooled_slots": pooled_slots(plan.pooled_slots),
        }.items()
        if listed
    }


def pooled_slots(words: Words) -> Json:
    names = {POOLS_LAST: "last", POOLS_MEAN: "mean"}
    return [{"slot": slot, "pooling": names[pooling]} for slot, pooling in zip(words[::2], words[1::2], strict=True)]


def mask_rows(masks: StepMasks) -> dict[str, Json]:
    size = 1 + masks.num_mask_words
    words = list(masks.new_masks)
    new_masks = [words[first : first + size] for first in range(0, len(words), size)]
    return {
        "masked": records(masks.masked, "row", "position", "mask"),
        "new_masks": [{"mask": number, "words": cast("Json", bits)} for number, *bits in new_masks],
    }


def adjustment(record: Adjustment) -> Json:
    bias: list[Json] = [{"id": id, "bias": bias} for id, bias in zip(record.bias_ids, record.bias, strict=True)]
    fields = {name: getattr(record, name) for name in record.__struct_fields__ if name not in ("bias_ids", "bias")}
    return {name: listed(value) for name, value in fields.items()} | {"bias": bias}


def listed(value: object) -> Json:
    """Views and tuples of views as lists."""
    match value:
        case tuple():
            return [listed(item) for item in value]
        case memoryview():
            return list(value)
        case _:
            return cast("Json", value)


def records(words: Words, *names: str) -> Json:
    fields = [iter(words)] * len(names)
    return [dict(zip(names, record, strict=True)) for record in zip(*fields, strict=True)]


def prefill_row(words: Iterator[int]) -> Json:
    slot, start, length, flags = (next(words) for _ in range(4))
    flags_by_name: dict[str, Json] = {
        "is_last_chunk": flags & IS_LAST_CHUNK != 0,
        "lookahead": flags & LOOKAHEAD != 0,
    }
    return {"slot": slot, "start": start, "length": length, **flags_by_name}


@pytest.mark.parametrize("name", NAMES)
def test_golden_frames_are_what_they_are_described_as(name: str) -> None:
    assert described(decode(golden_frames(name))) == description(name)


@pytest.mark.parametrize("name", NAMES)
def test_golden_frames_are_encoded_to_identical_bytes(name: str) -> None:
    frames = golden_frames(name)
    assert encode(decode(frames)) == frames


@pytest.mark.parametrize("name", NAMES)
def test_frames_may_be_views_of_a_larger_buffer(name: str) -> None:
    raw = memoryview(b"?" + b"".join(golden_frames(name)))
    views, start = [], 1
    for frame in golden_frames(name):
        views.append(raw[start : start + len(frame)])
        start += len(frame)
    assert decode(views) == decode(golden_frames(name))


def test_every_kind_has_a_golden_file() -> None:
    assert {golden_frames(name)[0][0] for name in NAMES} == set(Kind)


def test_arrays_of_a_result_are_words() -> None:
    result = decode(golden_frames("result_decode"))
    assert isinstance(result, StepResult)
    assert isinstance(result.token_ids, memoryview)
    assert (result.token_ids.format, result.token_ids.itemsize) == ("I", 4)
