"""The load: the requests of one case and one seed, and when each is due."""

from __future__ import annotations

import random
from typing import TypeAlias

import msgspec

from plait.bench.datasets import MOONCAKE_BLOCK, FileRow, TraceRow
from plait.bench.lengths import Distribution, Ratio, sample_lengths, sample_output_lengths
from plait.bench.pace import Pace, due_offsets
from plait.bench.prompts import Part, Prompt, PromptMaker, VerbatimPrompt


class Random(msgspec.Struct, frozen=True):
    """Prompts of random content. Each begins with one of `num_prefixes` shared prefixes, if there are any."""

    input_len: Distribution
    output_len: Distribution | Ratio
    num_prefixes: int = 0
    prefix_len: int = 0


class Trace(msgspec.Struct, frozen=True):
    """A recorded trace: its lengths, its shared blocks, its timestamps."""

    rows: tuple[TraceRow, ...]


class FromFile(msgspec.Struct, frozen=True):
    """Prompts of a file, in its order, repeated as often as needed."""

    rows: tuple[FileRow, ...]
    output_len: Distribution
    """For prompts without their own output length."""


Source: TypeAlias = Random | Trace | FromFile


class Case(msgspec.Struct, frozen=True):
    """One case of a benchmark: what is sent, and at which pace."""

    name: str
    source: Source
    pace: Pace
    num_prompts: int
    scale: float = 1.0
    """Factor on all lengths in tokens."""
    max_len: int | None = None
    """Limit on prompt plus output; longer requests are left out."""


class Request(msgspec.Struct, frozen=True):
    """One request of a load."""

    prompt: Prompt
    output_len: int
    stamp: float | None = None
    """Timestamp of a trace, in seconds."""

    @property
    def input_len(self) -> int | None:
        """Tokens of the prompt; None if they are not known beforehand."""
        return (
            self.prompt.num_tokens
            if isinstance(self.prompt, VerbatimPrompt)
            else sum(p.num_tokens for p in self.prompt)
        )


class Load(msgspec.Struct, frozen=True):
    """The requests of one case and seed, in the order in which they are due."""

    case: Case
    requests: list[Request]
    due: list[float]
    """Seconds after the first request."""
    num_left_out: int

    @property
    def num_all_prefix(self) -> int:
        """Requests that are not longer than their shared prefix and keep one token of their own."""
        if not (isinstance(self.case.source, Random) and self.case.source.num_prefixes):
            return 0
        num_shared = _shared_len(self.case.source, self.case.scale)
        return sum((request.input_len or 0) <= num_shared for request in self.requests)


def build_load(case: Case, seed: int, salt: str, duration: float | None) -> Load:
    """The load of `case`. The seed decides lengths and arrivals; seed and salt decide contents."""
    rng = random.Random(f"{seed}/{case.name}")
    requests = _requests(case, rng, f"{salt}/{seed}/{case.name}")
    fitting = [request for request in requests if case.max_len is None or _fits(request, case.max_len)]
    stamps = [request.stamp for request in fitting if request.stamp is not None]
    due = due_offsets(case.pace, len(fitting), stamps or None, rng)
    num_due = sum(offset <= duration for offset in due) if duration is not None else len(due)
    return Load(case, fitting[:num_due], due[:num_due], len(requests) - len(fitting))


def body_prompt(request: Request, maker: PromptMaker) -> bytes:
    """The JSON value of the request's `prompt` or `messages`."""
    return request.prompt.json if isinstance(request.prompt, VerbatimPrompt) else maker.make(request.prompt)


def _fits(request: Request, max_len: int) -> bool:
    return (request.input_len or 0) + request.output_len <= max_len


def _requests(case: Case, rng: random.Random, key: str) -> list[Request]:
    match case.source:
        case Random():
            return _random(case.source, case.num_prompts, case.scale, rng, key)
        case Trace():
            return [
                _make_traced_request(row, case.scale, f"{key}/{index}", key)
                for index, row in enumerate(case.source.rows)
            ]
        case FromFile():
            return _from_file(case.source, case.num_prompts, case.scale, rng)


def _random(source: Random, num: int, scale: float, rng: random.Random, key: str) -> list[Request]:
    inputs = sample_lengths(source.input_len, num, rng, scale)
    outputs = sample_output_lengths(source.output_len, inputs, rng, scale)
    shared = [_shared_len(source, scale)] * num if source.num_prefixes else [0] * num
    return [
        Request(
            _make_prefixed_parts(f"{key}/{index}", f"{key}/prefix {index % max(1, source.num_prefixes)}", own, prefix),
            out,
        )
        for index, (own, prefix, out) in enumerate(zip(inputs, shared, outputs, strict=True))
    ]


def _shared_len(source: Random, scale: float) -> int:
    return max(1, round(scale * source.prefix_len))


def _make_prefixed_parts(own_key: str, prefix_key: str, num_tokens: int, num_shared: int) -> tuple[Part, ...]:
    """A prompt of `num_tokens` that begins with a shared prefix; at least one token is its own."""
    num_shared = min(num_shared, num_tokens - 1)
    own = Part(own_key, num_tokens - num_shared)
    return (Part(prefix_key, num_shared), own) if num_shared else (own,)


def _make_traced_request(row: TraceRow, scale: float, own_key: str, key: str) -> Request:
    """A prompt of blocks keyed by their hash ids, so that equal ids are equal tokens."""
    num_tokens = max(1, round(scale * row.input_len))
    block = max(1, round(scale * MOONCAKE_BLOCK))
    parts = [
        Part(f"{key}/block {block_id}", min(block, num_tokens - start))
        for block_id, start in zip(row.blocks, range(0, num_tokens, block), strict=False)
    ]
    num_left = num_tokens - sum(part.num_tokens for part in parts)
    if num_left:
        parts.append(Part(own_key, num_left))
    return Request(tuple(parts), max(1, round(scale * row.output_len)), row.stamp)


def _from_file(source: FromFile, num: int, scale: float, rng: random.Random) -> list[Request]:
    lengths = sample_lengths(source.output_len, num, rng, scale)
    rows = (source.rows[index % len(source.rows)] for index in range(num))
    return [Request(row.prompt, row.output_len or length) for row, length in zip(rows, lengths, strict=True)]
