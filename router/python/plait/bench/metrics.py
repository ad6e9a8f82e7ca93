"""The metrics of a run, each defined here once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

import msgspec

from plait.bench.messages import Outcome
from plait.bench.percentiles import Summary, summary
from plait.bench.run import Run
from plait.bench.slo import Slo


class Timed(msgspec.Struct, frozen=True):
    """One completed request; times in seconds."""

    index: int
    num_prompt_tokens: int
    """From the server's usage, else as asked for."""
    num_output_tokens: int
    """From the server's usage, else the tokens of its chunks."""
    ttft: float | None
    """None if the response was not streamed, or empty. Then `tpot` is None and the gaps are empty."""
    tpot: float | None
    gaps: list[float]
    """Between chunks."""
    token_gaps: list[float]
    """Between tokens: tokens that arrived together share their gap evenly."""
    e2e: float


class Metrics(msgspec.Struct, frozen=True):  # budget: the metrics that the table shows
    """The metrics of one run; in seconds, and tokens or requests a second."""

    duration: float
    num_completed: int
    failures: dict[str, int]
    num_unfinished: int
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    total_tokens_per_second: float
    peak_output_tokens_per_second: float | None
    """None if the run is shorter than a second."""
    peak_concurrency: int
    mean_concurrency: float
    goodput: float | None
    """Requests a second that meet the SLO; None without one."""
    latencies: dict[str, Summary | None]
    """`ttft`, `tpot`, `itl` (per chunk), `itl_token` and `e2e`."""
    wait: Summary | None
    """From the intended arrival to when the client sends."""


DEFINITIONS = {
    "duration": "from the first intended arrival to the end of the last response, or to the interruption",
    "latencies": "of completed requests, from the intended arrival (closed loop: from when the client takes them up)",
    "TTFT": "to the first chunk with a token",
    "TPOT": "(last token - first token) / (tokens - 1) of each request",
    "ITL per chunk": "gap between two chunks with tokens of a response; 0 if one read brought both",
    "ITL per token": "the same gap shared evenly by the tokens that arrived at its end",
    "E2E": "to the end of the response",
    "tokens/s": "tokens of completed requests over the duration; peak: of the busiest whole second",
    "concurrency": "requests sent and not ended: the peak, and the mean over the duration",
    "percentiles": "linear interpolation between the ordered values (numpy's default)",
}


def compute_metrics(run: Run, slo: Slo | None) -> Metrics:
    """All metrics of a run."""
    timed = [timed_request(run, outcome) for outcome in run.outcomes if outcome.failure is None]
    ended = run.ended if run.is_partial else max((outcome.freed for outcome in run.outcomes), default=run.ended)
    duration = max(ended - run.begun, 1e-6)  # Ctrl-C may come before the first arrival
    num_output = sum(one.num_output_tokens for one in timed)
    num_prompt = sum(one.num_prompt_tokens for one in timed)
    return Metrics(
        duration=duration,
        num_completed=len(timed),
        failures=dict(Counter(outcome.failure for outcome in run.outcomes if outcome.failure is not None)),
        num_unfinished=run.num_unfinished,
        requests_per_second=len(timed) / duration,
        output_tokens_per_second=num_output / duration,
        prompt_tokens_per_second=num_prompt / duration,
        total_tokens_per_second=(num_output + num_prompt) / duration,
        peak_output_tokens_per_second=max(tokens_by_second(run), default=0) if duration >= 1 else None,
        peak_concurrency=peak_concurrency(run),
        mean_concurrency=sum(freed - taken for taken, freed in run.spans) / duration,
        goodput=sum(_is_good(one, slo) for one in timed) / duration if slo is not None else None,
        latencies=_latencies(timed),
        wait=summary([outcome.taken - outcome.intended for outcome in run.outcomes if outcome.failure is None]),
    )


def timed_request(run: Run, outcome: Outcome) -> Timed:
    """Latencies and counts of a completed request."""
    times, counts = outcome.arrivals, outcome.tokens
    num_tokens = outcome.num_output_tokens if outcome.num_output_tokens is not None else sum(counts)
    asked = run.load.requests[outcome.index].input_len
    was_streamed = run.streamed and len(times) > 0
    return Timed(
        index=outcome.index,
        num_prompt_tokens=outcome.num_prompt_tokens if outcome.num_prompt_tokens is not None else asked or 0,
        num_output_tokens=num_tokens,
        ttft=times[0] - outcome.intended if was_streamed else None,
        tpot=(times[-1] - times[0]) / (num_tokens - 1) if was_streamed and num_tokens > 1 else None,
        gaps=[late - early for early, late in pairwise(times)],
        token_gaps=list(_token_gaps(times, counts)),
        e2e=outcome.ended - outcome.intended,
    )


def _token_gaps(times: Iterable[float], counts: Iterable[int]) -> Iterator[float]:
    reads: list[list[float]] = []
    for time, count in zip(times, counts, strict=True):
        if reads and reads[-1][0] == time:
            reads[-1][1] += count
        else:
            reads.append([time, count])
    for (early, _), (late, num) in pairwise(reads):
        yield from [(late - early) / num] * int(num)


def _latencies(timed: list[Timed]) -> dict[str, Summary | None]:
    return {
        "ttft": summary([one.ttft for one in timed if one.ttft is not None]),
        "tpot": summary([one.tpot for one in timed if one.tpot is not None]),
        "itl": summary([gap for one in timed for gap in one.gaps]),
        "itl_token": summary([gap for one in timed for gap in one.token_gaps]),
        "e2e": summary([one.e2e for one in timed]),
    }


def _is_good(one: Timed, slo: Slo) -> bool:
    return slo.is_met(one.ttft, one.tpot, max(one.gaps, default=None), one.e2e)


def tokens_by_second(run: Run) -> list[int]:
    """Output tokens of completed requests by the second of their arrival; without streaming, of the response's end."""
    seconds: Counter[int] = Counter()
    for outcome in run.outcomes:
        if outcome.failure is None:
            for time, count in _token_arrivals(run, outcome):
                seconds[int(time - run.begun)] += count
    return [seconds[second] for second in range(max(seconds, default=-1) + 1)]


def _token_arrivals(run: Run, outcome: Outcome) -> Iterator[tuple[float, int]]:
    if run.streamed:
        return zip(outcome.arrivals, outcome.tokens, strict=True)
    return iter([(outcome.ended, timed_request(run, outcome).num_output_tokens)])


def peak_concurrency(run: Run) -> int:
    """The most requests in flight at a time."""
    changes = sorted(change for taken, freed in run.spans for change in ((taken, 1), (freed, -1)))
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak
