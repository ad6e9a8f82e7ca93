"""Whether the tokens that a loaded server emitted are those of a plain one: teacher-forced, by the torch backend.

A server in a fresh process, with the same seeded weights and torch's attention, is given prompt and answer as one
prompt and tells each token's log-probability beside the best one's. The gap between both is 0 where a greedy answer
was right; rounding swaps tokens that are nearly as good, a fault in cache, position or row takes any token.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypedDict

import httpx

MEDIAN_GAP, WORST_GAP = 0.05, 0.5
"""Natural logarithms: more, and the figure of the run does not count."""
SERVE_FLAGS = ("--attention-backend", "torch", "--no-cuda-graphs", "--no-prefix-cache", "--memory-fraction", "0.7")
MAX_SEQS, MAX_BATCH_TOKENS = 16, 4096
_AT_A_TIME = 4
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

    @property
    def median(self) -> float:
        """Half of them are no larger."""
        return statistics.median(self.values)

    @property
    def is_right(self) -> bool:
        """Whether a run's figures count."""
        return bool(self.values) and self.median <= MEDIAN_GAP and max(self.values) <= WORST_GAP


def rescore(url: str, model: str, streams: Sequence[Stream]) -> Gaps:
    """Ask the plain server about every stream; raises `httpx.HTTPError`."""
    with httpx.Client(base_url=url, timeout=_TIMEOUT_SECONDS) as client, ThreadPoolExecutor(_AT_A_TIME) as pool:
        found = list(pool.map(lambda stream: token_gaps(_scores(client, model, stream), stream["answer"]), streams))
    return Gaps(len(found), [gap for gaps in found for gap in gaps])


def _scores(client: httpx.Client, model: str, stream: Stream) -> list[Mapping[str, Scored] | None]:
    body = {
        "model": model,
        "prompt": stream["prompt"] + stream["answer"],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 1,
    }
    response = client.post("/v1/completions", json=body).raise_for_status()
    scores: list[Mapping[str, Scored] | None] = response.json()["choices"][0]["prompt_logprobs"]
    return scores


def token_gaps(scores: Sequence[Mapping[str, Scored] | None], answer: Sequence[int]) -> list[float]:
    """The gap of each token of an answer that ends a prompt with these log-probabilities."""
    behind = scores[len(scores) - len(answer) :]
    return [
        max(each["logprob"] for each in entry.values()) - entry[str(token)]["logprob"]
        for entry, token in zip(behind, answer, strict=True)
        if entry is not None
    ]
