"""Length distributions of prompts and outputs, and samples that give every seed the same work."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable
from statistics import NormalDist
from typing import TypeAlias

import msgspec

from plait.errors import SettingsError

MAX_LEN = 4_194_304
"""Tokens of one prompt or output; over any model's context."""
FORMS = (
    "128, uniform:100-200, lognormal:mean=12000,p99=100000[,max=120000], "
    "percentiles:50=900,90=3000,99=8000 or, for outputs, ratio:0.01 of their prompt"
)


class Fixed(msgspec.Struct, frozen=True):
    """The same length always."""

    tokens: int

    def quantile(self, share: float) -> float:
        """The length at quantile `share`, 0 to 1."""
        return self.tokens


class Uniform(msgspec.Struct, frozen=True):
    """Every length from `low` to `high`, equally likely."""

    low: int
    high: int

    def quantile(self, share: float) -> float:
        """The length at quantile `share`, 0 to 1."""
        return self.low + share * (self.high - self.low)


class LogNormal(msgspec.Struct, frozen=True):
    """Log-normal with a given mean and 99th percentile, cut at `most`."""

    mean: float
    p99: float
    most: float

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm: the smaller root of p99 / mean = exp(z sigma - sigma^2 / 2)."""
        z = NormalDist().inv_cdf(0.99)
        return z - math.sqrt(z * z - 2 * math.log(self.p99 / self.mean))

    def quantile(self, share: float) -> float:
        """The length at quantile `share`, 0 to 1."""
        sigma = self.sigma
        median = self.mean * math.exp(-sigma * sigma / 2)
        return min(median * math.exp(sigma * NormalDist().inv_cdf(share)), self.most)


class Percentiles(msgspec.Struct, frozen=True):
    """Linear between stated percentiles, constant beyond the first and the last."""

    percents: tuple[float, ...]
    tokens: tuple[int, ...]

    def quantile(self, share: float) -> float:
        """The length at quantile `share`, 0 to 1."""
        percent = share * 100
        after = bisect_right(self.percents, percent)
        if after in (0, len(self.percents)):
            return self.tokens[0 if after == 0 else -1]
        (p0, p1), (t0, t1) = self.percents[after - 1 : after + 1], self.tokens[after - 1 : after + 1]
        return t0 + (percent - p0) / (p1 - p0) * (t1 - t0)


class Ratio(msgspec.Struct, frozen=True):
    """A fraction of the request's prompt length."""

    of_prompt: float


Distribution: TypeAlias = Fixed | Uniform | LogNormal | Percentiles


def sample_lengths(lengths: Distribution, num: int, rng: random.Random, scale: float = 1.0) -> list[int]:
    """`num` lengths in tokens, at least 1 each: the distribution's mid-quantiles in random order.

    Every seed has the same lengths; only their order differs.
    """
    sampled = [max(1, round(scale * lengths.quantile((rank + 0.5) / num))) for rank in range(num)]
    rng.shuffle(sampled)
    return sampled


def sample_output_lengths(
    lengths: Distribution | Ratio, prompts: list[int], rng: random.Random, scale: float
) -> list[int]:
    """The output length for each prompt length."""
    if isinstance(lengths, Ratio):
        return [max(1, round(prompt * lengths.of_prompt)) for prompt in prompts]
    return sample_lengths(lengths, len(prompts), rng, scale)


def read_lengths(flag: str, words: str) -> Distribution | Ratio:
    """Parse a distribution; raises `SettingsError` that lists the forms."""
    kind, _, rest = words.partition(":") if ":" in words else ("fixed", "", words)
    try:
        lengths: Distribution | Ratio = _READERS[kind](rest)
    except (KeyError, ValueError) as error:
        given = f"{flag} is {words!r}"
        reason = f" ({error})" if isinstance(error, ValueError) else ""
        raise SettingsError(f"{given}{reason}; allowed: {FORMS}") from None
    return lengths


def read_own_lengths(flag: str, words: str) -> Distribution:
    """Parse a distribution that may not be a ratio of the prompt."""
    lengths = read_lengths(flag, words)
    if isinstance(lengths, Ratio):
        raise SettingsError(f"{flag} is {words!r}; there is no prompt length to take a ratio of; allowed: {FORMS}")
    return lengths


def _tokens(word: str) -> int:
    tokens = int(word) if word.isdecimal() else 0
    if not 1 <= tokens <= MAX_LEN:
        raise ValueError(f"{word!r} is no whole number from 1 to {MAX_LEN}")
    return tokens


def _fixed(rest: str) -> Fixed:
    return Fixed(_tokens(rest))


def _uniform(rest: str) -> Uniform:
    low, high = (_tokens(word) for word in rest.split("-"))
    if low > high:
        raise ValueError(f"{low} is over {high}")
    return Uniform(low, high)


def _pairs(rest: str) -> dict[str, str]:
    return dict((name, value) for name, value in (word.split("=") for word in rest.split(",")))


def _lognormal(rest: str) -> LogNormal:
    pairs = _pairs(rest)
    if not {"mean", "p99"} <= pairs.keys() <= {"mean", "p99", "max"}:
        raise ValueError("lognormal takes mean, p99 and max")
    mean, p99 = _tokens(pairs["mean"]), _tokens(pairs["p99"])
    limit = math.exp(NormalDist().inv_cdf(0.99) ** 2 / 2)
    if not mean < p99 <= mean * limit:
        raise ValueError(f"a lognormal's p99 is over its mean and at most {limit:.1f} times it")
    return LogNormal(mean, p99, _tokens(pairs["max"]) if "max" in pairs else MAX_LEN)


def _percentiles(rest: str) -> Percentiles:
    pairs = sorted((float(percent), _tokens(tokens)) for percent, tokens in _pairs(rest).items())
    percents, tokens = tuple(percent for percent, _ in pairs), tuple(tokens for _, tokens in pairs)
    if not all(0 <= percent <= 100 for percent in percents):
        raise ValueError("percentiles lie between 0 and 100")
    if list(tokens) != sorted(tokens):
        raise ValueError("lengths rise with their percentile")
    return Percentiles(percents, tokens)


def _ratio(rest: str) -> Ratio:
    ratio = float(rest)
    if not 0 < ratio <= 1000:
        raise ValueError("a ratio is over 0 and up to 1000")
    return Ratio(ratio)


_READERS: dict[str, Callable[[str], Distribution | Ratio]] = {
    "fixed": _fixed,
    "uniform": _uniform,
    "lognormal": _lognormal,
    "percentiles": _percentiles,
    "ratio": _ratio,
}
