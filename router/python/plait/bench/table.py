"""A run as a text table, with every metric defined below it."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator

from plait.bench.measure import Measured
from plait.bench.metrics import DEFINITIONS, Metrics
from plait.bench.percentiles import Summary
from plait.bench.prompts import TextSize
from plait.bench.run import Run
from plait.bench.slo import Slo

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL per chunk", "itl_token": "ITL per token", "e2e": "E2E"}
_COUNTING = {
    "running-usage": "tokens of a chunk: from the usage that the server sends with each",
    "token-ids": "tokens of a chunk: from the token ids that the server sends; totals from its usage",
    "usage": "totals from the server's usage; each chunk counts as one token in ITL per token and in the peak",
    "chunks": "the server sends no token counts: each chunk counts as one token",
}


def table(measured: Measured) -> str:
    """The metrics of one run as text."""
    run, metrics = measured.run, measured.metrics
    head = f"{run.load.case.name}  {run.server}  {run.model}  seed {run.seed}  ({run.load.case.pace.words})"
    parts = [head, *_warnings(measured), _counts(metrics), _latencies(metrics), *_failures(run)]
    return "\n".join(parts) + "\n"


def _warnings(measured: Measured) -> Iterator[str]:
    if measured.run.is_partial:
        yield f"  PARTIAL: interrupted; {measured.metrics.num_unfinished} requests had not ended"
    if measured.client_lag.reasons:
        yield "  INVALID: the client was late: " + "; ".join(measured.client_lag.reasons)


def _counts(metrics: Metrics) -> str:
    peak = metrics.peak_output_tokens_per_second
    left = [
        ("duration", f"{metrics.duration:.2f} s"),
        ("completed", f"{metrics.num_completed}"),
        ("failed", f"{sum(metrics.failures.values())}"),
        ("requests/s", f"{metrics.requests_per_second:.3f}"),
        ("goodput", "no --slo" if metrics.goodput is None else f"{metrics.goodput:.3f} requests/s"),
    ]
    right = [
        ("generated tokens/s", f"{metrics.output_tokens_per_second:.1f}"),
        ("prefill tokens/s", f"{metrics.prompt_tokens_per_second:.1f}"),
        ("total tokens/s", f"{metrics.total_tokens_per_second:.1f}"),
        ("peak generated tokens/s", "-" if peak is None else f"{peak:.0f}"),
        ("concurrency, mean / peak", f"{metrics.mean_concurrency:.1f} / {metrics.peak_concurrency}"),
    ]
    pairs = zip(left, right, strict=True)
    return "\n".join(f"  {a:<12}{b:<24}{c:<26}{d}" for (a, b), (c, d) in pairs)


def _latencies(metrics: Metrics) -> str:
    lines = ["  {:<16}{:>10}{:>10}{:>10}{:>10}{:>10}".format("ms", "mean", "p50", "p90", "p99", "max")]
    rows = {name: metrics.latencies[key] for key, name in LATENCIES.items()}
    if metrics.wait is not None and metrics.wait.max > 0.001:
        rows["wait to be sent"] = metrics.wait
    lines += [f"  {name:<16}{_format_summary(found)}" for name, found in rows.items()]
    return "\n".join(lines)


def _format_summary(found: Summary | None) -> str:
    if found is None:
        return f"{'-':>10}" * 5
    values = (found.mean, found.p50, found.p90, found.p99, found.max)
    return "".join(f"{value * 1000:>10.2f}" for value in values)


def _failures(run: Run) -> Iterator[str]:
    """One line for each kind of failure, with one example."""
    examples = {outcome.failure: outcome.detail for outcome in run.outcomes if outcome.failure is not None}
    for kind, detail in examples.items():
        num = sum(outcome.failure == kind for outcome in run.outcomes)
        yield f"  {num} failed: {kind}: {' '.join(detail.split())}"


def foot(runs: list[Measured], slo: Slo | None, size: TextSize | None) -> str:
    """Definitions of the metrics, and notes on these runs."""
    lines = [f"{name}: {meaning}" for name, meaning in DEFINITIONS.items()]
    lines += [_COUNTING[kind] for kind in dict.fromkeys(one.run.counting for one in runs)]
    lines += notes(runs, size)
    if slo is not None:
        lines.append(f"goodput: completed requests with {slo.words} (itl: the longest gap), a second")
    return "\n".join(textwrap.fill(line, 118, initial_indent="  ", subsequent_indent="    ") for line in lines)


def notes(runs: list[Measured], size: TextSize | None) -> list[str]:
    """What a reader must know of these runs besides their metrics."""
    found = [
        _short_answers(runs),
        _chunked_tokens(runs),
        _prompt_lengths(runs),
        _left_out(runs),
        _describe_resent(runs),
    ]
    found.append(_all_prefix(runs))
    if size is not None:
        found.append(_text_size(size))
    return [note for note in found if note]


def _text_size(size: TextSize) -> str:
    if not size.is_measured:
        return "prompts are texts: the server sends no usage, so a word (or a character of --text) counts as a token"
    return (
        f"prompts are texts: {size.tokens_per_piece:.3g} tokens a word (or character of --text) and "
        f"{size.overhead:.0f} of the chat template, from the server's usage"
    )


def _short_answers(runs: list[Measured]) -> str:
    pairs = [
        (outcome.num_output_tokens, one.run.load.requests[outcome.index].output_len)
        for one in runs
        for outcome in one.run.outcomes
        if outcome.failure is None and outcome.num_output_tokens is not None
    ]
    num = sum(got != wanted for got, wanted in pairs)
    return f"{num} of {len(pairs)} outputs have another length than was asked for" if num else ""


def _chunked_tokens(runs: list[Measured]) -> str:
    by_usage = counted = 0
    for one in runs:
        for outcome in one.run.outcomes:
            if outcome.failure is None and outcome.num_output_tokens is not None and one.run.streamed:
                by_usage += outcome.num_output_tokens
                counted += sum(outcome.tokens)
    return f"the chunks hold {counted} tokens, the usage says {by_usage}" if by_usage != counted else ""


def _prompt_lengths(runs: list[Measured]) -> str:
    off = [
        outcome.num_prompt_tokens - asked
        for one in runs
        for outcome in one.run.outcomes
        if outcome.num_prompt_tokens is not None
        and (asked := one.run.load.requests[outcome.index].input_len) is not None
    ]
    if not any(off):
        return ""
    return (
        f"by the usage, prompts are {statistics.fmean(off):+.1f} tokens off on average ({min(off):+} to {max(off):+})"
    )


def _left_out(runs: list[Measured]) -> str:
    num = max((one.run.load.num_left_out for one in runs), default=0)
    return f"{num} requests over --max-len were left out" if num else ""


def _all_prefix(runs: list[Measured]) -> str:
    num = max((one.run.load.num_all_prefix for one in runs), default=0)
    return f"{num} prompts are not longer than their shared prefix: one token of each is its own" if num else ""


def _describe_resent(runs: list[Measured]) -> str:
    num = sum(one.client_lag.num_resent for one in runs)
    return f"{num} requests were sent again: the server had closed an idle connection" if num else ""
