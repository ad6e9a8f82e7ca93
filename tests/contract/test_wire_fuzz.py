"""Broken frames give ``Malformed`` and nothing else; valid ones survive a round trip."""

from __future__ import annotations

import contextlib
import struct
from typing import TypeVar, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec import inspect
from plait_proto import (
    Bye,
    Decision,
    Drain,
    Fail,
    ForwardDone,
    Heartbeat,
    Hello,
    Join,
    Malformed,
    Message,
    NewSlot,
    Plan,
    StepMasks,
    StepResult,
    Vote,
    Welcome,
    decode,
    encode,
)
from plait_testing.wire_golden import NAMES, golden_frames

U32 = st.integers(0, 2**32 - 1)

T = TypeVar("T")
Frames = list[bytes]


GOLDEN_FRAMES = [golden_frames(name) for name in NAMES]
HUGE_HEADERS = [marker + b"\xff" * 4 for marker in (b"\xc6", b"\xc9", b"\xdb", b"\xdd", b"\xdf")]


@st.composite
def mutated_frames(draw: st.DrawFn) -> Frames:
    frames = list(draw(st.sampled_from(GOLDEN_FRAMES)))
    for _ in range(draw(st.integers(1, 3))):
        if frames:
            draw(st.sampled_from([flip_bit, truncate, insert, overwrite, drop, repeat, swap]))(draw, frames)
    return frames


def place(draw: st.DrawFn, frames: Frames) -> tuple[int, int]:
    """A frame, and a position in it or at its end."""
    frame = draw(st.integers(0, len(frames) - 1))
    return frame, draw(st.integers(0, len(frames[frame])))


def flip_bit(draw: st.DrawFn, frames: Frames) -> None:
    frame, at = place(draw, frames)
    content = bytearray(frames[frame])
    if at < len(content):
        content[at] ^= 1 << draw(st.integers(0, 7))
    frames[frame] = bytes(content)


def truncate(draw: st.DrawFn, frames: Frames) -> None:
    frame, at = place(draw, frames)
    frames[frame] = frames[frame][:at]


def insert(draw: st.DrawFn, frames: Frames) -> None:
    frame, at = place(draw, frames)
    frames[frame] = frames[frame][:at] + draw(st.binary(min_size=1, max_size=8)) + frames[frame][at:]


def overwrite(draw: st.DrawFn, frames: Frames) -> None:
    frame, at = place(draw, frames)
    frames[frame] = frames[frame][:at] + draw(st.sampled_from(HUGE_HEADERS)) + frames[frame][at + 5 :]


def drop(draw: st.DrawFn, frames: Frames) -> None:
    frame, _ = place(draw, frames)
    del frames[frame]


def repeat(draw: st.DrawFn, frames: Frames) -> None:
    frame, _ = place(draw, frames)
    frames.append(frames[frame])


def swap(draw: st.DrawFn, frames: Frames) -> None:
    one, _ = place(draw, frames)
    other, _ = place(draw, frames)
    frames[one], frames[other] = frames[other], frames[one]


def values(kind: inspect.Type) -> SearchStrategy[object]:
    """Any value of a field's type."""
    match kind:
        case inspect.IntType(ge=least, le=most):
            return st.integers(least, 2**64 - 1 if most is None else most)
        case inspect.EnumType(cls=enum):
            return st.sampled_from(enum)
        case inspect.BytesType(min_length=least, max_length=most):
            return st.binary(min_size=least or 0, max_size=40 if most is None else most)
        case inspect.StrType():
            return st.text(st.characters(exclude_categories=["Cs"]), max_size=1000)
        case inspect.FloatType():
            return st.floats(allow_nan=False, allow_infinity=False)
        case inspect.BoolType():
            return st.booleans()
        case inspect.UnionType(types=options):
            return st.one_of(*map(values, options))
        case inspect.NoneType():
            return st.none()
        case inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=3).map(tuple)
        case inspect.StructType(cls=struct_type, fields=fields):
            return st.builds(struct_type, **{field.name: values(field.type) for field in fields})
        case _:
            raise TypeError(f"no values for {kind}")


def structs_of(kind: type[T]) -> SearchStrategy[T]:
    return cast("SearchStrategy[T]", values(inspect.type_info(kind)))


def words(numbers: list[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def arrays(max_size: int = 40) -> SearchStrategy[bytes]:
    return st.lists(U32, max_size=max_size).map(words)


def triples(kinds: SearchStrategy[int]) -> SearchStrategy[bytes]:
    """``kind, slot`` and a page or a number of pages."""
    return st.lists(st.tuples(kinds, U32, U32), max_size=4).map(
        lambda found: words([word for it in found for word in it])
    )


@st.composite
def adjustments(draw: st.DrawFn) -> bytes:
    """One record."""
    floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
    head = draw(st.tuples(U32, floats, floats, floats, U32))
    lists = [draw(st.lists(U32, max_size=3)) for _ in range(4)]
    bias = draw(st.lists(st.tuples(U32, floats), max_size=3))
    bad_words = draw(st.lists(st.lists(U32, min_size=1, max_size=3), max_size=3))
    prompt, output, allowed, ends = lists
    counts = [len(each) for each in (prompt, output, bias, allowed, ends, bad_words)]
    pairs = b"".join(struct.pack("<If", *pair) for pair in bias)
    of_bad_words = [word for ids in bad_words for word in (len(ids), *ids)]
    front = struct.pack("<I3fI6I", *head, *counts) + words([*prompt, *output])
    return front + pairs + words([*allowed, *ends, *of_bad_words])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    prefill = draw(st.lists(st.tuples(U32, U32, st.integers(1, 20), st.integers(0, 3)), max_size=5))
    decode_rows = draw(st.lists(st.tuples(U32, U32), max_size=20))
    lengths = draw(st.just([]) | st.lists(st.integers(1, 4), min_size=len(decode_rows), max_size=len(decode_rows)))
    num_token_ids = sum(length + (flags >> 1) for _, _, length, flags in prefill)
    return Plan(
        step=draw(st.integers(0, 2**64 - 1)),
        num_prefill=len(prefill),
        num_decode=len(decode_rows),
        new_slots=tuple(draw(st.lists(structs_of(NewSlot), max_size=3))),
        decision=draw(st.none() | structs_of(Decision)),
        rows=words([word for row in (*prefill, *decode_rows, lengths) for word in row]),
        token_ids=words(list(range(num_token_ids))),
        appended_pages=words([word for pair in draw(st.lists(st.tuples(U32, U32), max_size=9)) for word in pair]),
        freed_slots=draw(arrays()),
        other_pages=draw(triples(st.integers(1, 2**32 - 1))),
        trimmed_slots=draw(triples(U32)),
        adjustments=b"".join(draw(st.lists(adjustments(), max_size=3))),
        scored_ids=words([word for pair in draw(st.lists(st.tuples(U32, U32), max_size=3)) for word in pair]),
        restored_slots=words([word for pair in draw(st.lists(st.tuples(U32, U32), max_size=3)) for word in pair]),
        saved_slots=draw(triples(U32)),
        pooled_slots=words(
            [word for pair in draw(st.lists(st.tuples(U32, st.integers(1, 2)), max_size=3)) for word in pair]
        ),
        awaits_masks=draw(st.booleans()),
    )


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    accepted = draw(st.lists(st.lists(U32, max_size=3), max_size=20))
    return StepResult(
        step=draw(st.integers(0, 2**64 - 1)),
        elapsed_us=draw(st.integers(0, 2**64 - 1)),
        num_accepted=words([len(ids) for ids in accepted]),
        token_ids=words([token for ids in accepted for token in ids]),
        logprobs=draw(arrays()),
        prompt_logprobs=draw(arrays()),
        pooled=draw(arrays()),
    )


@st.composite
def step_masks(draw: st.DrawFn) -> StepMasks:
    num_words = draw(st.integers(0, 4))
    masks = draw(st.lists(st.lists(U32, min_size=1 + num_words, max_size=1 + num_words), max_size=4))
    return StepMasks(
        step=draw(st.integers(0, 2**64 - 1)),
        is_last=draw(st.booleans()),
        num_mask_words=num_words,
        masked=draw(triples(U32)),
        left_out=draw(arrays()),
        new_masks=words([word for mask in masks for word in mask]),
    )


PLAIN: tuple[type[Message], ...] = (Hello, Welcome, Vote, Decision, Drain, Heartbeat, Fail, Bye, Join, ForwardDone)


@settings(max_examples=2000, deadline=None)
@given(mutated_frames())
def test_mutated_frames_give_a_message_or_malformed(frames: Frames) -> None:
    try:
        message = decode(frames)
    except Malformed:
        return
    assert decode(encode(message)) == message


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 16), st.binary(max_size=200))
def test_noise_gives_a_message_or_malformed(kind: int, header: bytes) -> None:
    with contextlib.suppress(Malformed):
        decode([bytes([kind]), header])


@settings(max_examples=500, deadline=None)
@given(st.one_of([structs_of(kind) for kind in PLAIN]))
def test_a_plain_message_survives_its_frames(message: Message) -> None:
    assert decode(encode(message)) == message


@settings(max_examples=300, deadline=None)
@given(plans() | results() | step_masks())
def test_a_message_with_arrays_survives_its_frames(message: Plan | StepResult | StepMasks) -> None:
    decoded = decode(encode(message))
    assert type(decoded) is type(message)
    assert encode(decoded) == encode(message)
