"""Broken inputs, made from those of the corpus: an input follows from its target, seed and number alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

MAX_BYTES = 1 << 20
MAX_CHANGES = 6
MAX_DOUBLINGS = 14
"""A repeated range repeats up to 2^13 times: brackets in brackets, keys after keys."""
EDGES = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1, (1 << 64) - 1)
NUMBERS = (b"0", b"-1", b"2147483648", b"4294967296", b"9223372036854775808", b"1" + b"0" * 400, b"1e308", b"1e999")
TEXTS = (b"\0", b"\xff", b"\xed\xa0\x80", b"\\ud800", "\ufeff".encode(), "\U0001f469\u200d\U0001f680".encode(), b'"')


def make_input(target: str, seed: int, number: int, corpus: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """One of the corpus, for the first numbers, or one that is made from some of them."""
    if number < len(corpus):
        return corpus[number]
    draw = random.Random(f"{target} {seed} {number}")
    spoilt = bytearray(draw.choice(corpus))
    for _ in range(draw.randint(1, MAX_CHANGES)):
        _change(spoilt, draw, corpus, words)
        del spoilt[MAX_BYTES:]
    return bytes(spoilt)


def _change(spoilt: bytearray, draw: random.Random, corpus: Sequence[bytes], words: Sequence[bytes]) -> None:
    at = draw.randint(0, len(spoilt))
    end = min(len(spoilt), at + draw.randint(1, 32))
    match draw.randrange(12):
        case 0 | 1:
            spoilt[at : at + 1] = bytes([byte ^ 1 << draw.randrange(8) for byte in spoilt[at : at + 1]])
        case 2:
            del spoilt[at:]
        case 3:
            del spoilt[at:end]
        case 4:
            times = 1 << draw.randrange(draw.choice((2, MAX_DOUBLINGS)))
            spoilt[at:at] = spoilt[at:end] * min(times, MAX_BYTES // max(1, end - at))
        case 5 | 6:
            spoilt[at:at] = draw.choice(words)
        case 7:
            width = draw.choice((1, 2, 4, 8))
            spoilt[at : at + width] = draw.choice(EDGES).to_bytes(8, "little")[:width]
        case 8:
            begin, end = _number_at(spoilt, at)
            spoilt[begin:end] = draw.choice(NUMBERS)
        case 9:
            other = draw.choice(corpus)
            spoilt[at:] = other[draw.randint(0, len(other)) :]
        case 10:
            spoilt[at:end] = draw.choice(TEXTS)
        case _:
            spoilt[at:at] = draw.randbytes(draw.randint(1, 9))


def _number_at(spoilt: bytearray, at: int) -> tuple[int, int]:
    """The digits around a place; nothing, if there are none."""
    begin = end = at
    while begin > 0 and spoilt[begin - 1 : begin].isdigit():
        begin -= 1
    while end < len(spoilt) and spoilt[end : end + 1].isdigit():
        end += 1
    return begin, end
