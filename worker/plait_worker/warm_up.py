"""Warm-up steps: steps of many sizes, each computed once at start over the dummy page.

A GPU loads a kernel at its first use, and that waits for all running work: every stream would stall. The libraries
choose kernels by the numbers of tokens, rows and cached tokens, so these sizes are random and widely spread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from plait_worker.step_inputs import Ints, StepInputs

_NUM_STEPS = 40
_MOST_PROMPTS, _MOST_DECODE_ROWS = 3, 256
_LONGEST_CHUNK, _LONGEST_CONTEXT = 4096, 16_384
"""Tokens; the profile run (``profile_run``) covers larger steps."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds from the settings."""

    max_tokens: int
    """Of a step."""
    max_slots: int
    max_context: int
    """Tokens that a request may have."""


def warm_up_steps(limits: StepLimits) -> Iterator[StepInputs]:
    """Mixed steps: chunks of one to three prompts and some decode rows, each in an empty slot; all rows sample."""
    generator = np.random.default_rng(0)
    for _ in range(_NUM_STEPS):
        yield _make_random_step(generator, limits)


def _make_random_step(generator: np.random.Generator, limits: StepLimits) -> StepInputs:
    most_decode = min(_MOST_DECODE_ROWS, limits.max_slots - 1, limits.max_tokens - 1)
    num_decode = _spread(generator, 0, most_decode)
    most_prompts = min(_MOST_PROMPTS, limits.max_slots - num_decode, limits.max_tokens - num_decode)
    num_prompts = int(generator.integers(1, most_prompts + 1))
    longest = min(_LONGEST_CHUNK, (limits.max_tokens - num_decode) // num_prompts, limits.max_context)
    chunks = [_spread(generator, 1, longest) for _ in range(num_prompts)]
    lengths_R = np.array([*chunks, *[1] * num_decode], dtype=np.int64)
    starts_R = np.array([_start(generator, limits, length) for length in lengths_R.tolist()], dtype=np.int64)
    return _inputs(starts_R, lengths_R, num_prompts)


def _start(generator: np.random.Generator, limits: StepLimits, length: int) -> int:
    """Half of the rows have no context."""
    longest = min(_LONGEST_CONTEXT, limits.max_context - length)
    return _spread(generator, 0, longest) * int(generator.integers(0, 2))


def _spread(generator: np.random.Generator, least: int, most: int) -> int:
    """An integer from ``least`` to ``most``, log-uniform."""
    value = np.exp(generator.uniform(np.log(least + 1), np.log(most + 2)))
    return min(int(value) - 1, most)


def _inputs(starts_R: Ints, lengths_R: Ints, num_prompts: int) -> StepInputs:
    num_rows = len(lengths_R)
    nothing = np.zeros(0, dtype=np.int64)
    return StepInputs(
        freed_F=nothing,
        new_slots=(),
        appended_A2=nothing.reshape(0, 2),
        num_prefill=num_prompts,
        slots_R=np.arange(num_rows),
        starts_R=starts_R,
        lengths_R=lengths_R,
        samples_R=np.ones(num_rows, dtype=np.bool_),
        has_lookahead_P=np.zeros(num_prompts, dtype=np.bool_),
        token_ids=np.zeros(int(lengths_R[:num_prompts].sum()), dtype=np.int64),
    )
