"""Whether the tokens that a loaded server emitted are those of a plain one: teacher-forced, by the torch backend.

A server in a fresh process, with the same seeded weights and torch's attention, is given prompt and answer as one
prompt and tells each token's log-probability beside the best one's. The gap between both is 0 where a greedy answer
was right; rounding swaps tokens that are nearly as good, a fault in cache, position or row takes any token.

With FP8 weights the server multiplies as `plain_fp8` says, and scores each stream twice: as it is defined, and with
every matmul's result rounded up or down at random. The second pass's best tokens have gaps in the first as a right
engine's have, from rounding alone: the floor. Bounds for the engine's gaps grow by `FLOOR_FACTOR` times the floor's.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.plain_fp8 import Rounding, Rules

MEDIAN_GAP, WORST_GAP = 0.05, 0.5
"""Natural logarithms: more, and the figure of the run does not count."""
FLOOR_FACTOR = 1.5
"""Two right engines are as far apart as two roundings are; half as much more is for engines that round at other places,
as attention does."""
LARGEST_FLOOR = 0.5
"""Median, in nats: where rounding alone does more, streams say too little. Any token instead of the best lies some 5
nats below it at these shapes."""
NUM_BEST = 20
"""Tokens whose log-probabilities are asked for, the most that a server tells."""
SERVE_FLAGS = ("--attention-backend", "torch", "--no-cuda-graphs", "--no-prefix-cache", "--memory-fraction", "0.7")
MAX_SEQS, MAX_BATCH_TOKENS = 16, 4096
_AT_A_TIME = MAX_SEQS // 2
"""The scores of 16 prompts of 8,448 tokens are more than a server holds at once."""
_TIMEOUT_SECONDS = 300.0


class Stream(TypedDict):
    """As `plait bench --keep-streams` writes it."""

    index: int
    prompt: list[int]
    answer: list[int]


class Scored(TypedDict):
    """A token's entry in a prompt's log-probabilities."""

    logprob: float


@dataclass(frozen=True, slots=True)
class Gaps:
    """Of every emitted token of some streams: the best log-probability less its own."""

    num_streams: int
    values: Sequence[float]
    floor: Sequence[float] = ()
    """What rounding alone makes, token by token; empty where it makes less than the bounds."""

    @property
    def median(self) -> float:
        """Half of them are no larger."""
        return statistics.median(self.values)

    @property
    def median_bound(self) -> float:
        """The largest median of a run that counts."""
        return MEDIAN_GAP + (FLOOR_FACTOR * statistics.median(self.floor) if self.floor else 0.0)

    @property
    def worst_bound(self) -> float:
        """The largest gap of a run that counts."""
        return WORST_GAP + (FLOOR_FACTOR * max(self.floor) if self.floor else 0.0)

    @property
    def is_right(self) -> bool:
        """Whether a run's figures count."""
        if not self.values or (self.floor and statistics.median(self.floor) > LARGEST_FLOOR):
            return False
        return self.median <= self.median_bound and max(self.values) <= self.worst_bound


def rescore(url: str, model: str, streams: Sequence[Stream]) -> Gaps:
    """Ask the plain server about every stream; raises `httpx.HTTPError`."""
    scored = _score_all(url, model, streams, num_best=1)
    found = [token_gaps(scores, stream["answer"]) for scores, stream in zip(scored, streams, strict=True)]
    return Gaps(len(found), [gap for gaps in found for gap in gaps])


def rescore_fp8(url: str, model: str, streams: Sequence[Stream], rules_file: Path, at_a_time: int | None) -> Gaps:
    """Ask a server that computes FP8 by the rules of a file; the engine had so many streams at a time, None if any."""
    passes = []
    for rounding in Rounding:
        decode_from = len(streams[0]["prompt"]) if at_a_time else None
        Rules(rounding, decode_from, at_a_time or 0).write(rules_file)
        passes.append(_score_all(url, model, streams, NUM_BEST))
    defined, otherwise = passes
    answers = [stream["answer"] for stream in streams]
    values = [gap for scores, answer in zip(defined, answers, strict=True) for gap in token_gaps(scores, answer)]
    floor = [
        gap
        for scores, others, answer in zip(defined, otherwise, answers, strict=True)
        for gap in rounding_gaps(scores, others, len(answer))
    ]
    return Gaps(len(streams), values, floor)


TokenScores = Sequence[Mapping[str, Scored] | None]


def _score_all(url: str, model: str, streams: Sequence[Stream], num_best: int) -> list[TokenScores]:
    with httpx.Client(base_url=url, timeout=_TIMEOUT_SECONDS) as client, ThreadPoolExecutor(_AT_A_TIME) as pool:
        return list(pool.map(lambda stream: _scores(client, model, stream, num_best), streams))


def _scores(client: httpx.Client, model: str, stream: Stream, num_best: int) -> TokenScores:
    body = {
        "model": model,
        "prompt": stream["prompt"] + stream["answer"],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": num_best,
    }
    response = client.post("/v1/completions", json=body).raise_for_status()
    scores: TokenScores = response.json()["choices"][0]["prompt_logprobs"]
    return scores


def token_gaps(scores: TokenScores, answer: Sequence[int]) -> list[float]:
    """The gap of each token of an answer that ends a prompt with these log-probabilities."""
    behind = scores[len(scores) - len(answer) :]
    return [
        _best(entry) - entry[str(token)]["logprob"]
        for entry, token in zip(behind, answer, strict=True)
        if entry is not None
    ]


def rounding_gaps(scores: TokenScores, others: TokenScores, num_tokens: int) -> list[float]:
    """The gap of another pass's best token at each of the last positions; of one that is not told, the least it has."""
    gaps = []
    for entry, other in zip(scores[-num_tokens:], others[-num_tokens:], strict=True):
        assert entry is not None, "an answer follows a prompt"
        assert other is not None
        chosen = max(other, key=lambda token: other[token]["logprob"])
        told = entry.get(chosen) or min(entry.values(), key=lambda scored: scored["logprob"])
        gaps.append(_best(entry) - told["logprob"])
    return gaps


def _best(entry: Mapping[str, Scored]) -> float:
    return max(each["logprob"] for each in entry.values())
