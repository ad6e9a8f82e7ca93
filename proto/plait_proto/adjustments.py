"""What requests change about the logits that their tokens are sampled from: frame 8 of a plan."""

from __future__ import annotations

import array
import math
import struct
from collections.abc import Iterator

import msgspec

_HEAD = struct.Struct("<I3f7I")
_HEAD_WORDS = 11


class Adjustment(msgspec.Struct, frozen=True):
    """Changes of one new slot's logits, in the order penalties, bias, allowed and closed tokens.

    Only requests that ask for some have one. Lists of ids are views of format ``I``.
    """

    slot: int
    """It is among the plan's new slots."""
    presence_penalty: float
    """Subtracted once from each token of the output."""
    frequency_penalty: float
    """Subtracted from a token for each time that the output has it."""
    repetition_penalty: float
    """Divides positive logits of tokens in prompt or output, and multiplies the others."""
    min_tokens: int
    """Until the output has so many tokens, ``end_ids`` are closed."""
    prompt_ids: memoryview
    """The prompt's tokens, each once; empty without a repetition penalty."""
    output_ids: memoryview
    """The output so far: not empty after a preemption."""
    bias_ids: memoryview
    bias: memoryview[float]
    """Added to the logits of ``bias_ids``; format ``f``."""
    allowed_ids: memoryview
    """The only tokens that may be sampled; empty for all."""
    end_ids: memoryview
    """Tokens that end the output."""
    bad_words: tuple[memoryview, ...]
    """Sequences that the output may not have, at least one token each."""


class CutError(ValueError):
    """The words end within a record, or a bad word has no tokens."""


class _Words:
    """Words that are taken from the front."""

    def __init__(self, words: memoryview) -> None:
        self.rest = words

    def take(self, num: int) -> memoryview:
        if num > len(self.rest):
            raise CutError
        taken, self.rest = self.rest[:num], self.rest[num:]
        return taken


def read_adjustments(words: memoryview) -> Iterator[Adjustment]:
    """The records in frame 8, a view of format ``I``. Raises ``CutError``."""
    left = _Words(words)
    while len(left.rest):
        slot, presence, frequency, repetition, *counts = _HEAD.unpack(left.take(_HEAD_WORDS))
        min_tokens, prompt, output, num_biases, allowed, ends, num_bad_words = counts
        prompt_ids, output_ids, pairs = left.take(prompt), left.take(output), left.take(2 * num_biases)
        yield Adjustment(
            slot=slot,
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
            min_tokens=min_tokens,
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            bias_ids=pairs[::2],
            bias=_floats(pairs)[1::2],
            allowed_ids=left.take(allowed),
            end_ids=left.take(ends),
            bad_words=tuple(_take_bad_word(left) for _ in range(num_bad_words)),
        )


def _floats(words: memoryview) -> memoryview[float]:
    """The same bits as floats. memoryview casts no empty view."""
    return memoryview(array.array("f", words.tobytes()))


def _take_bad_word(left: _Words) -> memoryview:
    (length,) = left.take(1)
    if length == 0:
        raise CutError
    return left.take(length)


def not_finite(adjustment: Adjustment) -> tuple[str, float] | None:
    """The first float that is infinite or no number, with its name."""
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    floats = [(name, getattr(adjustment, name)) for name in penalties]
    floats += [("bias", bias) for bias in adjustment.bias.tolist()]
    return next(((name, value) for name, value in floats if not math.isfinite(value)), None)
