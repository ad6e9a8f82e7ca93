"""Each rule of the wire: an error names the one that was broken."""

from __future__ import annotations

import math
import struct
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest
from plait_proto import (
    ExitCode,
    Fail,
    Heartbeat,
    Hello,
    Malformed,
    Message,
    NewSlot,
    Plan,
    StepMasks,
    StepResult,
    decode,
    encode,
)
from plait_proto.codec import MAX_FRAME_BYTES, MAX_HEADER_BYTES, MAX_TEXT_BYTES


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


NEW_SLOT = NewSlot(
    slot=3, next_output=0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, logprobs=None, prompt_logprobs=None
)
PLAN = Plan(
    step=5,
    num_prefill=1,
    num_decode=1,
    new_slots=(),
    decision=None,
    rows=words(1, 0, 2, 2, 0, 9),
    token_ids=words(7, 8, 9),
    appended_pages=b"",
    freed_slots=b"",
)
RESULT = StepResult(
    step=5, elapsed_us=9, num_accepted=words(1, 2), token_ids=words(7, 8, 9), logprobs=b"", prompt_logprobs=b""
)
HELLO = Hello(
    protocol=1,
    schema=bytes(16),
    config=bytes(16),
    rank=0,
    world=1,
    pid=1,
    device="cpu",
    dtype="float32",
    num_pages=1,
    page_bytes=1,
    weight_bytes=1,
)


def refusal(message: Message, break_frames: Callable[[list[bytes]], None] = lambda frames: None) -> str:
    """What the receiver says to a message whose frames were broken."""
    frames = encode(message)
    break_frames(frames)
    with pytest.raises(Malformed) as refused:
        decode(frames)
    return str(refused.value)


def replaced(frame: int, content: bytes) -> Callable[[list[bytes]], None]:
    def replace(frames: list[bytes]) -> None:
        frames[frame] = content

    return replace


def test_the_unbroken_messages_pass() -> None:
    for message in (PLAN, RESULT, HELLO):
        assert encode(decode(encode(message))) == encode(message)


def test_the_number_of_frames_is_that_of_the_kind() -> None:
    assert refusal(PLAN, lambda frames: frames.clear()) == "0 frames; a message has 2 to 13"
    assert refusal(PLAN, lambda frames: frames.extend([b""] * 8)) == "14 frames; a message has 2 to 13"
    assert refusal(PLAN, lambda frames: frames.remove(frames[-1])) == "PLAN came in 5 frames; it has 6 to 13"
    assert refusal(RESULT, lambda frames: frames.extend([b"", b""])) == "STEP_RESULT came in 8 frames; it has 6 to 7"
    assert refusal(HELLO, lambda frames: frames.append(b"")) == "HELLO came in 3 frames; it has 2"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (b"", "frame 0 has 0 bytes; the kind is one byte"),
        (b"\x03\x03", "frame 0 has 2 bytes; the kind is one byte"),
        (b"\x00", "kind 0 is unknown; kinds go from 1 to 15"),
        (b"\x10", "kind 16 is unknown; kinds go from 1 to 15"),
    ],
)
def test_the_kind_is_one_known_byte(kind: bytes, reason: str) -> None:
    assert refusal(PLAN, replaced(0, kind)) == reason


def test_frames_have_caps() -> None:
    assert refusal(PLAN, replaced(1, bytes(MAX_HEADER_BYTES + 1))) == "frame 1 has 1048577 bytes; 1048576 are allowed"
    assert refusal(PLAN, replaced(5, bytes(MAX_FRAME_BYTES + 4))) == "frame 5 has 16777220 bytes; 16777216 are allowed"

    def add_two_arrays(frames: list[bytes]) -> None:
        frames[3] = frames[5] = bytes(MAX_FRAME_BYTES)

    reason = refusal(PLAN, add_two_arrays)
    assert reason.startswith("the message has 335")
    assert reason.endswith("bytes; 33554432 are allowed")
    largest = msgspec.structs.replace(PLAN, freed_slots=bytes(MAX_FRAME_BYTES))
    assert encode(decode(encode(largest))) == encode(largest)


def test_arrays_are_whole_words() -> None:
    assert refusal(PLAN, replaced(5, bytes(6))) == "frame 5 has 6 bytes, which is no whole number of 4-byte words"


def test_rows_are_as_many_as_the_header_says() -> None:
    assert refusal(PLAN, replaced(2, words(1, 0, 2, 2, 0))) == "frame 2 of PLAN has 5 words; the rest of it says 6"


def test_token_ids_are_those_of_the_chunks_and_lookaheads() -> None:
    assert refusal(PLAN, replaced(3, words(7, 8))) == "frame 3 of PLAN has 2 words; the rest of it says 3"


def test_appended_pages_are_pairs() -> None:
    assert refusal(PLAN, replaced(4, words(1, 2, 3))) == "frame 4 of PLAN has 3 words; each record has 2"


TWO_KINDS = msgspec.structs.replace(
    PLAN, rows=words(1, 0, 2, 2, 0, 9, 3), other_pages=words(1, 1, 4), trimmed_slots=words(0, 0, 1)
)


@pytest.mark.parametrize(
    ("changes", "num_frames"),
    [
        ({}, 8),
        ({"trimmed_slots": b""}, 7),
        ({"other_pages": b""}, 8),
        ({"other_pages": b"", "trimmed_slots": b""}, 6),
        ({"other_pages": b"", "trimmed_slots": b"", "scored_ids": bytes(8)}, 10),
        ({"other_pages": b"", "trimmed_slots": b"", "saved_slots": bytes(12)}, 12),
        ({"other_pages": b"", "trimmed_slots": b"", "pooled_slots": words(3, 2)}, 13),
    ],
)
def test_optional_frames_are_left_out_while_they_are_empty(changes: dict[str, bytes], num_frames: int) -> None:
    frames = encode(msgspec.structs.replace(TWO_KINDS, **changes))
    assert len(frames) == num_frames
    assert encode(decode(frames)) == frames


def test_a_pooled_slot_says_how_and_a_result_without_vectors_has_no_frame_of_them() -> None:
    pooled = msgspec.structs.replace(PLAN, pooled_slots=words(3, 2))
    refused = refusal(pooled, replaced(12, words(3, 4)))
    assert refused == "frame 12 of PLAN pools slot 3 by 4; 1 (last) and 2 (mean) are known"
    assert refusal(pooled, replaced(12, words(3))) == "frame 12 of PLAN has 1 words; each record has 2"
    with_vectors = msgspec.structs.replace(RESULT, pooled=words(0x3F800000))
    assert encode(decode(encode(with_vectors))) == encode(with_vectors)
    with pytest.raises(Malformed, match="frame 6 of STEP_RESULT is empty"):
        decode([*encode(RESULT), b""])


def test_the_last_optional_frame_is_not_empty() -> None:
    for frame, message in ((6, PLAN), (7, TWO_KINDS)):
        frames = [*encode(message)[:frame], b""]
        with pytest.raises(Malformed, match=f"frame {frame} of PLAN is empty"):
            decode(frames)


def test_optional_frames_hold_whole_records_of_their_kinds() -> None:
    for frame in (6, 7):
        assert refusal(TWO_KINDS, replaced(frame, words(1, 1))) == (
            f"frame {frame} of PLAN has 2 words; each record has 3"
        )
    with_slot_state = msgspec.structs.replace(PLAN, restored_slots=words(0, 1), saved_slots=words(0, 64, 2))
    for frame, record in ((10, 2), (11, 3)):
        assert refusal(with_slot_state, replaced(frame, words(1))) == (
            f"frame {frame} of PLAN has 1 words; each record has {record}"
        )
    refused = refusal(TWO_KINDS, replaced(6, words(1, 1, 4, 0, 2, 9)))
    assert refused == "frame 6 of PLAN has a page of kind 0 for slot 2; those are in frame 4"


HEAD = (1, 0, 0, 0x3F800000, 0, 0, 0, 1, 0, 0, 1)
"""Of slot 1, with one bias and one bad word."""


def test_adjustments_are_whole_and_finite() -> None:
    record = words(*HEAD, 3, 0x3F000000, 2, 7, 8)
    message = msgspec.structs.replace(PLAN, adjustments=record)
    assert encode(decode(encode(message))) == encode(message)
    assert len(encode(message)) == 9
    for num in range(1, len(record) // 4):
        assert refusal(message, replaced(8, record[: 4 * num])) == (
            f"frame 8 of PLAN has {num} words, which end within a record or have a bad word without tokens"
        )
    assert "bad word" in refusal(message, replaced(8, words(*HEAD, 3, 0x3F000000, 0)))
    infinite = words(*HEAD, 3, 0x7F800000, 2, 7, 8)
    assert refusal(message, replaced(8, infinite)) == "slot 1: bias is inf; a finite number is needed"


def test_decode_rows_have_all_their_lengths_or_none() -> None:
    assert refusal(TWO_KINDS, replaced(2, words(1, 0, 2, 2, 0))) == "frame 2 of PLAN has 5 words; the rest of it says 6"
    empty = words(1, 0, 2, 2, 0, 9, 0)
    assert refusal(TWO_KINDS, replaced(2, empty)) == "decode row 0 computes no token; each computes at least one"


def test_a_chunk_has_tokens_and_known_flags() -> None:
    empty = msgspec.structs.replace(PLAN, rows=words(1, 0, 0, 2, 0, 9))
    assert refusal(empty) == "prefill row 0 has no tokens; a chunk has at least one"
    flagged = msgspec.structs.replace(PLAN, rows=words(1, 0, 2, 4, 0, 9))
    assert refusal(flagged) == "prefill row 0 has flags 0x4; bits 0 and 1 are known"


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_sampling_parameters_are_finite(field: str, value: float) -> None:
    new_slot = msgspec.structs.replace(NEW_SLOT, **{field: value})
    refused = refusal(msgspec.structs.replace(PLAN, new_slots=(new_slot,)))
    assert refused == f"slot 3: {field} is {value}; a finite number is needed"


def test_the_tokens_of_a_result_are_those_that_its_rows_accepted() -> None:
    assert refusal(RESULT, replaced(3, words(7))) == "frame 3 of STEP_RESULT has 1 words; the rest of it says 3"


@pytest.mark.parametrize("frame", [2, 4])
def test_masks_are_whole_records_of_the_length_that_their_header_says(frame: int) -> None:
    masks = StepMasks(5, True, 2, words(0, 0, 1), words(), words(1, 3, 4))
    assert refusal(masks, replaced(frame, words(1, 2))) == f"frame {frame} of STEP_MASKS has 2 words; each record has 3"


@pytest.mark.parametrize("header", [b"", b"\x95\x05", b"\x92\x01\x02", b"\x95\x05\x01\x01\x90\xc0\x00", b"\xc1"])
def test_the_header_is_the_whole_array_and_no_more(header: bytes) -> None:
    assert refusal(PLAN, replaced(1, header)).startswith("frame 1 of PLAN: ")


@pytest.mark.parametrize(
    "broken",
    [
        msgspec.structs.replace(HELLO, rank=2**32),
        msgspec.structs.replace(HELLO, rank=-1),
        msgspec.structs.replace(HELLO, page_bytes=-1),
        msgspec.structs.replace(HELLO, schema=bytes(15)),
        msgspec.structs.replace(HELLO, config=bytes(17)),
    ],
)
def test_numbers_and_fingerprints_have_their_size(broken: Hello) -> None:
    assert refusal(broken).startswith("frame 1 of HELLO: Expected ")


def test_fields_that_came_later_are_ignored() -> None:
    assert decode([b"\x08", b"\x94\x01\x02\x91\x03\xa1x"]) == Heartbeat(rank=1, step=2)


def test_unknown_modes_and_exit_codes_are_named() -> None:
    assert "Invalid enum value 4" in refusal(PLAN, lambda frames: frames.__setitem__(slice(None), BAD_DECISION))
    assert "Invalid enum value 0" in refusal(PLAN, lambda frames: frames.__setitem__(slice(None), BAD_FAIL))


BAD_DECISION = [b"\x06", b"\x97\x01\x04\x00\xc0\xc4\x00\xc2\xc2"]
BAD_FAIL = [b"\x09", b"\x93\x00\x00\xa0"]


@pytest.mark.parametrize(
    ("reason", "received"),
    [
        ("a" * (MAX_TEXT_BYTES + 1), "a" * MAX_TEXT_BYTES),
        ("a" + "ü" * MAX_TEXT_BYTES, "a" + "ü" * (MAX_TEXT_BYTES // 2 - 1)),
    ],
)
def test_strings_are_cut_by_the_sender_between_characters(reason: str, received: str) -> None:
    fail = Fail(rank=0, code=ExitCode.BUG, reason=reason)
    assert decode(encode(fail)) == msgspec.structs.replace(fail, reason=received)


def test_a_string_that_is_no_text_is_sent_as_far_as_it_is() -> None:
    received = decode(encode(msgspec.structs.replace(HELLO, device="a\udc80b")))
    assert received == msgspec.structs.replace(HELLO, device="a?b")


def test_strings_are_refused_by_the_receiver_beyond_the_cap() -> None:
    reason = msgspec.msgpack.encode((0, 1, "ü" * (MAX_TEXT_BYTES // 2) + "a"))
    with pytest.raises(Malformed, match="a string of 4097 bytes; 4096 are allowed"):
        decode([b"\x09", reason])


@pytest.mark.parametrize("opening", [b"\x91", b"\x81"])
def test_deep_nesting_is_malformed(opening: bytes) -> None:
    with pytest.raises(Malformed, match="frame 1 of HEARTBEAT"):
        decode([b"\x08", b"\x93\x00\x00" + opening * 1_000_000])


@pytest.mark.parametrize("marker", [b"\xc6", b"\xc9", b"\xdb", b"\xdd", b"\xdf"])
def test_a_huge_length_reserves_no_memory(marker: bytes) -> None:
    frames = [b"\x03", b"\x95\x05\x00\x00" + marker + b"\xff\xff\xff\xff", b"", b"", b"", b""]
    tracemalloc.start()
    with pytest.raises(Malformed):
        decode(frames)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
