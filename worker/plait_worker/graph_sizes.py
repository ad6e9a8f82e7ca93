"""Sizes of the captured steps.

Shapes of a graph: T = C + D tokens, C prompt tokens in P rows, of which the last is never used, then D decode rows;
R = P + D rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait_worker.step_inputs import StepInputs

DECODE_ROWS = (1, 2, 4, 8, *range(16, 129, 16), *range(160, 257, 32), *range(320, 513, 64), *range(640, 1025, 128))
"""Rows of decode-only steps. Padding adds at most a quarter, and least where a row costs most."""
MIXED_DECODE_ROWS = (16, 32, 64, 128, 192, 256, 384, 512)
TILE, TILES = 128, (*range(1, 9), *range(10, 17, 2))
"""Tokens of steps with prompts, prompt and decode tokens together: a GEMM takes as long for part of a tile as for all.

Larger steps keep the device busy for longer than the host needs to launch them kernel by kernel, unless prompts are
planned.
"""
PLANNED_DECODE_ROWS, PLANNED_TILES = (32, 256, 512), (4, 8, 12, 16, 24)
"""Of steps whose prompts are planned; the tiles hold prompt tokens alone. There are fewer, since each exists once for
every context size.

Such a step has more kernels. The host launches those of a layer in 1.3 ms, or 2.6 where others use its cores: for the
27 layers of DeepSeek-V2-Lite it needs as long as an H200 for 3,500 tokens, or for 8,192.
"""
LARGE_PLANNED_TILES = (32, 40, 52)
"""Besides, up to the full step's, with no cached tokens or the most."""
MOST_PLANNED = 64 * TILE
"""Prompt tokens. Larger steps keep the device busy for longer than the slower launches take."""
FULL_STEP_ROWS = (32, 128, 256, 384, 512)
"""Decode rows of steps whose prompts take what these leave of the tokens of a step: most do under load."""
LEAST_PROMPT = 64
"""Prompt tokens of the smallest mixed step that has a graph."""
PROMPT_ROWS, PLANNED_PROMPT_ROWS = 17, 65
"""Prefill rows of a step with prompts, the unused one included; those of planned steps cost no attention."""


@dataclass(frozen=True, slots=True)
class GraphSize:
    """What fits into a graph."""

    prompt_tokens: int
    """C."""
    prompt_rows: int
    """P."""
    decode_rows: int
    """D."""
    context_tokens: int | None = None
    """Cached tokens of all prefill rows, if their attention is planned before each replay; else None."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.prompt_tokens + self.decode_rows

    @property
    def num_rows(self) -> int:
        """R."""
        return self.prompt_rows + self.decode_rows

    def holds(self, needed: GraphSize) -> bool:
        """Whether a step of the size ``needed`` fits."""
        return (
            needed.decode_rows <= self.decode_rows
            and needed.prompt_tokens <= self.prompt_tokens
            and needed.prompt_rows < max(self.prompt_rows, 1)
            and (self.context_tokens is None or (needed.context_tokens or 0) <= self.context_tokens)
        )

    def fits(self, needed: GraphSize) -> bool:
        """Whether it holds such a step, and does not plan prompts that are not there."""
        return self.holds(needed) and (self.context_tokens is None or needed.prompt_rows > 0)


def needed_size(inputs: StepInputs) -> GraphSize:
    """The smallest size that holds a step."""
    num_prefill, num_decode = inputs.num_prefill, len(inputs.slots_R) - inputs.num_prefill
    return GraphSize(inputs.num_tokens - num_decode, num_prefill, num_decode, int(inputs.starts_R[:num_prefill].sum()))


def capture_sizes(max_rows: int, max_tokens: int, contexts: Sequence[int] = ()) -> list[GraphSize]:
    """Graphs for up to ``max_rows`` decode rows and steps of ``max_tokens`` tokens, smallest first.

    Those whose prompts are planned hold one of ``contexts`` cached tokens, smallest first too.
    """
    decode = [GraphSize(0, 0, rows) for rows in _up_to(DECODE_ROWS, max_rows)]
    mixed = [
        GraphSize(tiles * TILE - rows, PROMPT_ROWS, rows)
        for tiles, rows in itertools.product(TILES, (0, *_up_to(MIXED_DECODE_ROWS, max_rows)))
        if tiles * TILE - rows >= LEAST_PROMPT and tiles * TILE <= max_tokens
    ]
    planned = dict.fromkeys((*_planned(max_rows, max_tokens, contexts), *_full(max_rows, max_tokens, contexts)))
    return sorted([*decode, *mixed, *planned], key=lambda size: (size.num_tokens, size.context_tokens or 0))


def _planned(max_rows: int, max_tokens: int, contexts: Sequence[int]) -> Iterator[GraphSize]:
    """Of some tiles each."""
    kinds = [*itertools.product(PLANNED_TILES, contexts)]
    kinds += itertools.product(LARGE_PLANNED_TILES, dict.fromkeys((*contexts[:1], *contexts[-1:])))
    for (tiles, context), rows in itertools.product(kinds, [*_up_to(PLANNED_DECODE_ROWS, max_rows)]):
        if tiles * TILE <= max_tokens:
            yield GraphSize(tiles * TILE, PLANNED_PROMPT_ROWS, rows, context)


def _full(max_rows: int, max_tokens: int, contexts: Sequence[int]) -> Iterator[GraphSize]:
    """Of steps that fill ``max_tokens``, if their prompts are more than ``PLANNED_TILES`` hold.

    With padding they have ``max_rows`` tokens more at most, which ranks have buffers for.
    """
    for below, most in itertools.pairwise((-1, *_up_to(FULL_STEP_ROWS, max_rows))):
        most_prompt = max_tokens - (below + 1)
        tiles = -(-most_prompt // TILE)
        if tiles > PLANNED_TILES[-1]:
            prompt_tokens = min(tiles * TILE, max_tokens + max_rows - most, MOST_PLANNED)
            yield from (GraphSize(prompt_tokens, PLANNED_PROMPT_ROWS, most, context) for context in contexts)


def _up_to(steps: Sequence[int], largest: int) -> Iterator[int]:
    """The steps below ``largest``, then ``largest`` if the steps reach it."""
    yield from (step for step in steps if step < largest)
    if largest <= steps[-1]:
        yield largest
