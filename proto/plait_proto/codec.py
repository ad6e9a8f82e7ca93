"""Messages to frames and back. Every cap is checked before anything is decoded."""

from __future__ import annotations

import array
import math
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from plait_proto.adjustments import CutError, not_finite, read_adjustments
from plait_proto.messages import (
    IS_LAST_CHUNK,
    LOOKAHEAD,
    POOLS_LAST,
    POOLS_MEAN,
    Bye,
    Decision,
    Drain,
    Fact,
    Fail,
    Fields,
    ForwardDone,
    Heartbeat,
    Hello,
    Join,
    Kind,
    MasksHeader,
    Message,
    NewSlot,
    Plan,
    PlanHeader,
    ResultHeader,
    StepMasks,
    StepResult,
    StoreReply,
    StoreRequest,
    Vote,
    Welcome,
    Words,
)
from plait_proto.undecodable import UNDECODABLE

MAX_FRAMES = 13
"""Frames that a message may have."""
MAX_HEADER_BYTES = 1 << 20
"""Bytes that frame 1 may have."""
MAX_FRAME_BYTES = 16 << 20
"""Bytes that each later frame may have."""
MAX_MESSAGE_BYTES = 32 << 20
"""Bytes that all frames of a message may have together."""
MAX_TEXT_BYTES = 4096
"""Bytes of UTF-8 that a string may have; the sender cuts longer ones."""

Frame = bytes | memoryview

_T = TypeVar("_T", bound=Fields)
_ENCODER = msgspec.msgpack.Encoder()
_PLAN_HEADER = msgspec.msgpack.Decoder(PlanHeader)
_RESULT_HEADER = msgspec.msgpack.Decoder(ResultHeader)
_MASKS_HEADER = msgspec.msgpack.Decoder(MasksHeader)
_HELLO = msgspec.msgpack.Decoder(Hello)
_FAIL = msgspec.msgpack.Decoder(Fail)
_FLOATS = tuple(field.name for field in msgspec.structs.fields(NewSlot) if field.type is float)
_JOIN = msgspec.msgpack.Decoder(Join)
_STORE_REQUEST = msgspec.msgpack.Decoder(StoreRequest)
_PLAIN: dict[
    Kind, msgspec.msgpack.Decoder[Welcome | Vote | Decision | Drain | Heartbeat | Bye | StoreReply | ForwardDone]
] = {
    Kind.WELCOME: msgspec.msgpack.Decoder(Welcome),
    Kind.VOTE: msgspec.msgpack.Decoder(Vote),
    Kind.DECISION: msgspec.msgpack.Decoder(Decision),
    Kind.DRAIN: msgspec.msgpack.Decoder(Drain),
    Kind.HEARTBEAT: msgspec.msgpack.Decoder(Heartbeat),
    Kind.BYE: msgspec.msgpack.Decoder(Bye),
    Kind.STORE_REPLY: msgspec.msgpack.Decoder(StoreReply),
    Kind.FORWARD_DONE: msgspec.msgpack.Decoder(ForwardDone),
}
_KINDS: dict[type[Message], Kind] = {
    Hello: Kind.HELLO,
    Welcome: Kind.WELCOME,
    Plan: Kind.PLAN,
    StepResult: Kind.STEP_RESULT,
    Vote: Kind.VOTE,
    Decision: Kind.DECISION,
    Drain: Kind.DRAIN,
    Heartbeat: Kind.HEARTBEAT,
    Fail: Kind.FAIL,
    Bye: Kind.BYE,
    Join: Kind.JOIN,
    StoreRequest: Kind.STORE_REQUEST,
    StoreReply: Kind.STORE_REPLY,
    StepMasks: Kind.STEP_MASKS,
    ForwardDone: Kind.FORWARD_DONE,
}
_NUM_OPTIONAL: dict[type[Fields], int] = {Hello: 3, Welcome: 2, Vote: 2, Decision: 1, Join: 1}
"""Fields at the end that may be left out."""
# At least, and at most.
_NUM_FRAMES = {kind: (2, 2) for kind in Kind} | {
    Kind.PLAN: (6, 13),
    Kind.STEP_RESULT: (6, 7),
    Kind.STEP_MASKS: (5, 5),
}
# memoryview.cast rejects an empty buffer.
_NO_WORDS = memoryview(array.array("I"))


class Malformed(ValueError):
    """The peer broke a rule of the wire; the message says which."""


def encode(message: Message) -> list[bytes]:
    """The frames of ``message``, the kind first."""
    kind = bytes([_KINDS[type(message)]])
    match message:
        case Plan():
            return [kind, *_encode_plan(message)]
        case StepResult():
            return [kind, *_encode_result(message)]
        case StepMasks():
            return [kind, *_encode_masks(message)]
        case Hello():
            message = msgspec.structs.replace(message, device=_cut(message.device), dtype=_cut(message.dtype))
        case Fail():
            message = msgspec.structs.replace(message, reason=_cut(message.reason))
        case Join():
            facts = tuple(Fact(_cut(fact.name), _cut(fact.value)) for fact in message.facts)
            message = msgspec.structs.replace(message, facts=facts)
        case StoreRequest():
            message = msgspec.structs.replace(message, key=_cut(message.key))
    return [kind, _ENCODER.encode(_without_empty_last(message))]


def _without_empty_last(fields: Fields) -> Fields | tuple[object, ...]:
    """What is encoded: optional fields at the end are left out while they are empty."""
    values = msgspec.structs.astuple(fields)
    least = len(values) - _NUM_OPTIONAL.get(type(fields), 0)
    num = next((num for num in range(len(values), least, -1) if values[num - 1]), least)
    return values[:num] if num < len(values) else fields


def decode(frames: Sequence[Frame]) -> Message:
    """The message in ``frames``; its arrays are views of them.

    Raises:
        Malformed: the frames break a rule of the wire; it names the first one.
    """
    kind = _check_caps(frames)
    header = frames[1]
    match kind:
        case Kind.PLAN:
            return _decode_plan(frames)
        case Kind.STEP_RESULT:
            return _decode_result(frames)
        case Kind.STEP_MASKS:
            return _decode_masks(frames)
        case Kind.HELLO:
            hello = _unpack(kind, _HELLO, header)
            _check_texts(kind, hello.device, hello.dtype)
            return hello
        case Kind.FAIL:
            fail = _unpack(kind, _FAIL, header)
            _check_texts(kind, fail.reason)
            return fail
        case Kind.JOIN:
            join = _unpack(kind, _JOIN, header)
            _check_texts(kind, *(text for fact in join.facts for text in (fact.name, fact.value)))
            return join
        case Kind.STORE_REQUEST:
            request = _unpack(kind, _STORE_REQUEST, header)
            _check_texts(kind, request.key)
            return request
        case _:
            return _unpack(kind, _PLAIN[kind], header)


def _check_caps(frames: Sequence[Frame]) -> Kind:
    if not 2 <= len(frames) <= MAX_FRAMES:
        raise Malformed(f"{len(frames)} frames; a message has 2 to {MAX_FRAMES}")
    sizes = [memoryview(frame).nbytes for frame in frames]
    if sizes[1] > MAX_HEADER_BYTES:
        raise Malformed(f"frame 1 has {sizes[1]} bytes; {MAX_HEADER_BYTES} are allowed")
    for index, size in enumerate(sizes[2:], start=2):
        if size > MAX_FRAME_BYTES:
            raise Malformed(f"frame {index} has {size} bytes; {MAX_FRAME_BYTES} are allowed")
        if size % 4:
            raise Malformed(f"frame {index} has {size} bytes, which is no whole number of 4-byte words")
    if sum(sizes) > MAX_MESSAGE_BYTES:
        raise Malformed(f"the message has {sum(sizes)} bytes; {MAX_MESSAGE_BYTES} are allowed")
    kind = _read_kind(frames[0], sizes[0])
    least, most = _NUM_FRAMES[kind]
    if not least <= len(frames) <= most:
        allowed = f"{least} to {most}" if least < most else least
        raise Malformed(f"{kind.name} came in {len(frames)} frames; it has {allowed}")
    return kind


def _read_kind(frame: Frame, num_bytes: int) -> Kind:
    if num_bytes != 1:
        raise Malformed(f"frame 0 has {num_bytes} bytes; the kind is one byte")
    try:
        return Kind(frame[0])
    except ValueError:
        raise Malformed(f"kind {frame[0]} is unknown; kinds go from 1 to {len(Kind)}") from None


def _encode_plan(plan: Plan) -> list[bytes]:
    decision = plan.decision and _without_empty_last(plan.decision)
    header = (plan.step, plan.num_prefill, plan.num_decode, plan.new_slots, decision)
    fields = (*header, True) if plan.awaits_masks else header
    arrays = [plan.rows, plan.token_ids, plan.appended_pages, plan.freed_slots]
    arrays += [plan.other_pages, plan.trimmed_slots, plan.adjustments, plan.scored_ids]
    arrays += [plan.restored_slots, plan.saved_slots, plan.pooled_slots]
    while len(arrays) > 4 and not len(arrays[-1]):
        arrays.pop()
    return [_ENCODER.encode(fields), *map(_array_bytes, arrays)]


def _encode_result(result: StepResult) -> list[bytes]:
    header = ResultHeader(result.step, result.elapsed_us)
    arrays = [result.num_accepted, result.token_ids, result.logprobs, result.prompt_logprobs]
    if len(result.pooled):
        arrays.append(result.pooled)
    return [_ENCODER.encode(header), *map(_array_bytes, arrays)]


def _decode_plan(frames: Sequence[Frame]) -> Plan:
    header = _unpack(Kind.PLAN, _PLAN_HEADER, frames[1])
    if len(frames) > 6 and not memoryview(frames[-1]).nbytes:
        frame = len(frames) - 1
        raise Malformed(f"frame {frame} of PLAN is empty; an empty optional frame comes only before a later one")
    arrays = [_words(frame) for frame in frames[2:]]
    rows, token_ids, appended_pages, freed_slots, *optional = arrays + [_NO_WORDS] * (11 - len(arrays))
    other_pages, trimmed_slots, adjustments, scored_ids, restored_slots, saved_slots, pooled_slots = optional
    _check_rows(header, rows)
    _check_words(Kind.PLAN, 3, token_ids, _num_token_ids(rows[: 4 * header.num_prefill]))
    _check_records(Kind.PLAN, 4, appended_pages, 2)
    _check_records(Kind.PLAN, 6, other_pages, 3)
    _check_records(Kind.PLAN, 7, trimmed_slots, 3)
    _check_records(Kind.PLAN, 9, scored_ids, 2)
    _check_records(Kind.PLAN, 10, restored_slots, 2)
    _check_records(Kind.PLAN, 11, saved_slots, 3)
    _check_pooled(pooled_slots)
    if 0 in (kinds := other_pages[::3].tolist()):
        slot = other_pages[3 * kinds.index(0) + 1]
        raise Malformed(f"frame 6 of PLAN has a page of kind 0 for slot {slot}; those are in frame 4")
    for new_slot in header.new_slots:
        _check_finite(new_slot)
    _check_adjustments(adjustments)
    return Plan(
        step=header.step,
        num_prefill=header.num_prefill,
        num_decode=header.num_decode,
        new_slots=header.new_slots,
        decision=header.decision,
        rows=rows,
        token_ids=token_ids,
        appended_pages=appended_pages,
        freed_slots=freed_slots,
        other_pages=other_pages,
        trimmed_slots=trimmed_slots,
        adjustments=adjustments,
        scored_ids=scored_ids,
        restored_slots=restored_slots,
        saved_slots=saved_slots,
        pooled_slots=pooled_slots,
        awaits_masks=header.awaits_masks,
    )


def _check_rows(header: PlanHeader, rows: memoryview) -> None:
    expected = 4 * header.num_prefill + 2 * header.num_decode
    if len(rows) != expected + header.num_decode:
        _check_words(Kind.PLAN, 2, rows, expected)
    lengths = rows[expected:].tolist()
    if 0 in lengths:
        raise Malformed(f"decode row {lengths.index(0)} computes no token; each computes at least one")


def _check_records(kind: Kind, frame: int, words: memoryview, record: int) -> None:
    if len(words) % record:
        raise Malformed(f"frame {frame} of {kind.name} has {len(words)} words; each record has {record}")


def _num_token_ids(prefill_rows: memoryview) -> int:
    """Token ids that the prefill rows need, lookaheads included."""
    lengths, flags = prefill_rows[2::4].tolist(), prefill_rows[3::4].tolist()
    if 0 in lengths:
        raise Malformed(f"prefill row {lengths.index(0)} has no tokens; a chunk has at least one")
    for row, bits in enumerate(flags):
        if bits & ~(IS_LAST_CHUNK | LOOKAHEAD):
            raise Malformed(f"prefill row {row} has flags {bits:#x}; bits 0 and 1 are known")
    return sum(lengths) + sum(bits & LOOKAHEAD != 0 for bits in flags)


def _check_finite(new_slot: NewSlot) -> None:
    for field in _FLOATS:
        value = getattr(new_slot, field)
        if not math.isfinite(value):
            raise Malformed(f"slot {new_slot.slot}: {field} is {value}; a finite number is needed")


def _check_adjustments(words: memoryview) -> None:
    try:
        for adjustment in read_adjustments(words):
            if (found := not_finite(adjustment)) is not None:
                field, value = found
                raise Malformed(f"slot {adjustment.slot}: {field} is {value}; a finite number is needed")
    except CutError:
        raise Malformed(
            f"frame 8 of PLAN has {len(words)} words, which end within a record or have a bad word without tokens"
        ) from None


def _decode_result(frames: Sequence[Frame]) -> StepResult:
    header = _unpack(Kind.STEP_RESULT, _RESULT_HEADER, frames[1])
    if len(frames) > 6 and not memoryview(frames[6]).nbytes:
        raise Malformed("frame 6 of STEP_RESULT is empty; an empty optional frame comes only before a later one")
    num_accepted, token_ids, logprobs, prompt_logprobs, *optional = map(_words, frames[2:])
    _check_words(Kind.STEP_RESULT, 3, token_ids, sum(num_accepted.tolist()))
    pooled = optional[0] if optional else _NO_WORDS
    return StepResult(header.step, header.elapsed_us, num_accepted, token_ids, logprobs, prompt_logprobs, pooled)


def _check_pooled(pooled_slots: memoryview) -> None:
    _check_records(Kind.PLAN, 12, pooled_slots, 2)
    for slot, word in zip(pooled_slots[::2], pooled_slots[1::2], strict=True):
        if word not in (POOLS_LAST, POOLS_MEAN):
            raise Malformed(f"frame 12 of PLAN pools slot {slot} by {word}; 1 (last) and 2 (mean) are known")


def _encode_masks(masks: StepMasks) -> list[bytes]:
    header = MasksHeader(masks.step, masks.is_last, masks.num_mask_words)
    return [_ENCODER.encode(header), *map(_array_bytes, (masks.masked, masks.left_out, masks.new_masks))]


def _decode_masks(frames: Sequence[Frame]) -> StepMasks:
    header = _unpack(Kind.STEP_MASKS, _MASKS_HEADER, frames[1])
    masked, left_out, new_masks = map(_words, frames[2:])
    _check_records(Kind.STEP_MASKS, 2, masked, 3)
    _check_records(Kind.STEP_MASKS, 4, new_masks, 1 + header.num_mask_words)
    return StepMasks(header.step, header.is_last, header.num_mask_words, masked, left_out, new_masks)


def _unpack(kind: Kind, decoder: msgspec.msgpack.Decoder[_T], frame: Frame) -> _T:
    try:
        return decoder.decode(frame)
    except UNDECODABLE as error:
        raise Malformed(f"frame 1 of {kind.name}: {error}") from None


def _words(frame: Frame) -> memoryview:
    view = memoryview(frame)
    return view.cast("B").cast("I") if view.nbytes else _NO_WORDS


def _array_bytes(words: Words) -> bytes:
    return memoryview(words).tobytes()


def _check_words(kind: Kind, frame: int, words: memoryview, expected: int) -> None:
    if len(words) != expected:
        raise Malformed(f"frame {frame} of {kind.name} has {len(words)} words; the rest of it says {expected}")


def _check_texts(kind: Kind, *texts: str) -> None:
    for text in texts:
        if (num_bytes := len(text.encode())) > MAX_TEXT_BYTES:
            raise Malformed(f"frame 1 of {kind.name}: a string of {num_bytes} bytes; {MAX_TEXT_BYTES} are allowed")


def _cut(text: str) -> str:
    """As many whole characters as fit; lone surrogates, which UTF-8 lacks, become ``?``."""
    return text.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore")
