"""How large the steps are that are captured.

Shapes: of a graph, T = C + D tokens: C prompt tokens in P rows, the last of which is never used, then D decode rows;
R = P + D rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait_worker.step_inputs import StepInputs

DECODE_ROWS = (1, 2, 4, 8, *range(16, 129, 16), *range(160, 257, 32), *range(320, 513, 64), *range(640, 1025, 128))
"""Rows of steps that only decode: padding costs at most a quarter, and little where a row costs much."""
MIXED_DECODE_ROWS = (16, 32, 64, 128, 192, 256, 384, 512)
TILE, TILES = 128, (*range(1, 9), *range(10, 17, 2))
"""Tokens of steps with prompts, of both kinds together: a product takes as long for a part of a tile as for all of it.

Above these the device takes longer than the host needs to launch one operation after the other.
"""
PLANNED_DECODE_ROWS, PLANNED_TILES = (32, 256, 512), (4, 8, 12, 16, 24)
"""Of steps whose prompts are planned, tiles of prompt tokens alone: fewer, since there is one of each for every room
for context.

Such a step has more operations than another; on an H200 the device takes as long as their launches at some 3,500 tokens
(16 heads, 27 layers: 38 ms).
"""
LEAST_PROMPT = 64
"""Prompt tokens of a mixed step that are worth a graph of their own."""
PROMPT_ROWS = 17
"""Prefill rows of a step with prompts, the unused one included."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a graph has room for."""

    prompt_tokens: int
    """C."""
    prompt_rows: int
    """P."""
    decode_rows: int
    """D."""
    context_tokens: int | None = None
    """What the prefill rows have cached, all together, where their attention is planned before each replay; else None.
    """

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.prompt_tokens + self.decode_rows

    @property
    def num_rows(self) -> int:
        """R."""
        return self.prompt_rows + self.decode_rows

    def fits(self, needed: Size) -> bool:
        """Whether a step that needs so much has room in it."""
        return (
            needed.decode_rows <= self.decode_rows
            and needed.prompt_tokens <= self.prompt_tokens
            and needed.prompt_rows < max(self.prompt_rows, 1)
            and (self.context_tokens is None or (needed.context_tokens or 0) <= self.context_tokens)
            and (self.context_tokens is None or needed.prompt_rows > 0)
        )


def needed_size(inputs: StepInputs) -> Size:
    """What a step needs of each."""
    num_prefill, num_decode = inputs.num_prefill, len(inputs.slots_R) - inputs.num_prefill
    return Size(inputs.num_tokens - num_decode, num_prefill, num_decode, int(inputs.starts_R[:num_prefill].sum()))


def sizes(max_rows: int, max_tokens: int, contexts: Sequence[int] = ()) -> list[Size]:
    """Graphs for up to ``max_rows`` decode rows and steps of ``max_tokens`` tokens, smallest first.

    Those whose prompts are planned have room for one of ``contexts``, in tokens.
    """
    decode = [Size(0, 0, rows) for rows in _up_to(DECODE_ROWS, max_rows)]
    mixed = [
        Size(tiles * TILE - rows, PROMPT_ROWS, rows)
        for tiles, rows in itertools.product(TILES, (0, *_up_to(MIXED_DECODE_ROWS, max_rows)))
        if tiles * TILE - rows >= LEAST_PROMPT and tiles * TILE <= max_tokens
    ]
    planned = [
        Size(tiles * TILE, PROMPT_ROWS, rows, context)
        for tiles, rows, context in itertools.product(PLANNED_TILES, _up_to(PLANNED_DECODE_ROWS, max_rows), contexts)
        if tiles * TILE <= max_tokens
    ]
    return sorted(decode + mixed + planned, key=lambda size: (size.num_tokens, size.context_tokens or 0))


def _up_to(steps: Sequence[int], largest: int) -> Iterator[int]:
    """The steps below ``largest``, then it, where they reach so far."""
    yield from (step for step in steps if step < largest)
    if largest <= steps[-1]:
        yield largest
