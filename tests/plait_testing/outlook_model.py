"""What running requests will need, in plain Python: admission reserves pages for the answers it expects."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

NUM_BUCKETS = 64
HALF_LIFE = 1024
"""Answers after which older ones count half."""
MAX_PRIOR = 2048
"""An answer is expected to end here, or at twice its length, if nothing else is known."""
BETWEEN_ENDS = (16, 64, 128, 256, 512, 1024)
"""Steps from now at which demand is looked at besides the ends of requests."""
NUM_TIMES = 32


def bucket_of(num_tokens: int) -> int:
    """Half octaves: from 1, 1.5, 2, 3, 4, 6, 8 on."""
    octave = max(num_tokens, 1).bit_length() - 1
    return 2 * octave + (octave > 0 and num_tokens >> (octave - 1) & 1)


def start_of(bucket: int) -> float:
    return float(1 << bucket // 2) * (1.5 if bucket % 2 else 1.0)


def latest_end(num_output: int, most: int) -> int:
    return min(most, max(MAX_PRIOR, 2 * num_output))


class OutputLengths:
    """How long answers are, by those that ended by themselves (Kaplan-Meier)."""

    def __init__(self) -> None:
        self.reached = [0.0] * NUM_BUCKETS
        self.ended = [0.0] * NUM_BUCKETS
        self.fit()

    def observe_token(self, num_tokens: int) -> None:
        bucket = bucket_of(num_tokens)
        if num_tokens <= 1 or bucket_of(num_tokens - 1) != bucket:
            self.reached[bucket] += 1

    def observe_end(self, num_tokens: int) -> None:
        self.ended[bucket_of(num_tokens)] += 1
        if self.reached[0] > HALF_LIFE:
            self.reached = [count / 2 for count in self.reached]
            self.ended = [count / 2 for count in self.ended]
        self.fit()

    def fit(self) -> None:
        """The share of answers that reach each bucket, and the mean length of those cut there."""
        self.share, self.mean = [1.0], [0.0]
        last = max((bucket for bucket in range(NUM_BUCKETS) if self.reached[bucket] > 0), default=NUM_BUCKETS)
        num_ended = num_reached = 0.0
        for bucket in range(NUM_BUCKETS):
            # Where no answer has got to yet, answers end as fast as before.
            ends = num_ended / (num_reached + 8) if bucket > last else self.ended[bucket] / (self.reached[bucket] + 1)
            num_ended = num_ended / 2 + self.ended[bucket]
            num_reached = num_reached / 2 + self.reached[bucket]
            before = self.share[-1]
            after = before * (1 - ends)
            width = start_of(bucket + 1) - start_of(bucket)
            self.share.append(max(after, sys.float_info.min))
            self.mean.append(self.mean[-1] + width * ((before + after) / 2))

    def survival(self, num_tokens: int) -> float:
        return _at(self.share, num_tokens)

    def expected_left(self, num_output: int, most: int) -> float:
        tokens = _at(self.mean, latest_end(num_output, most)) - _at(self.mean, num_output)
        return tokens / self.survival(num_output)


def _at(values: list[float], num_tokens: int) -> float:
    bucket = bucket_of(num_tokens)
    start, end = start_of(bucket), start_of(bucket + 1)
    share = max((num_tokens - start) / (end - start), 0.0)
    return values[bucket] + (values[bucket + 1] - values[bucket]) * share


@dataclass
class Growth:
    """One request from now on."""

    num_output: int
    latest_end: int
    num_tokens: float
    survival: float

    @property
    def num_left(self) -> int:
        return self.latest_end - self.num_output

    def demand(self, num_steps: int, lengths: OutputLengths) -> float:
        """Tokens that it is expected to hold after so many steps."""
        if num_steps > self.num_left:
            return 0.0
        return lengths.survival(self.num_output + num_steps) / self.survival * (self.num_tokens + num_steps)


class Forecast:
    """The running requests as one plan sees them."""

    def __init__(self, growths: list[Growth], capacity: float, lengths: OutputLengths) -> None:
        self.growths, self.capacity, self.lengths = growths, capacity, lengths
        times = sorted((it.num_left for it in growths), reverse=True)[:: len(growths) // NUM_TIMES + 1]
        self.demands = [(time, self.demand(time)) for time in (*times, *BETWEEN_ENDS)]

    def demand(self, num_steps: int) -> float:
        return sum(it.demand(num_steps, self.lengths) for it in self.growths)

    def fits(self, head: Growth) -> bool:
        """Whether one more always finds room."""
        at_its_end = self.demand(head.num_left) + head.demand(head.num_left, self.lengths)
        return at_its_end <= self.capacity and all(
            demand + head.demand(time, self.lengths) <= self.capacity for time, demand in self.demands
        )

    def push(self, growth: Growth) -> None:
        self.demands = [(time, demand + growth.demand(time, self.lengths)) for time, demand in self.demands]
        self.growths.append(growth)


@dataclass
class Outlook:
    """What is expected of running requests, and the share of the pool kept since it was too little."""

    lengths: OutputLengths = field(default_factory=OutputLengths)
    reserve: float = 0.0
    last_admitted: tuple[int, int] | None = None
    """The last admitted request, and the step in which it is expected to end."""
    blocked: tuple[int, int] | None = None
    """The head that was blocked, and the next step in which it is looked at again."""

    def observe_preemption(self) -> None:
        self.reserve = min(self.reserve + 0.02, 0.25)

    def decay(self) -> None:
        self.reserve *= 0.999
