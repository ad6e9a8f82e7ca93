"""The results as text."""

from __future__ import annotations

from plait.simulate.report import Percentiles, Summary, TenantSummary

MOST_TENANTS = 8
"""Tenants that are shown each on a line. Of more, only the largest and the others' worst are."""
_HEAD = f"{'':<18}{'p50':>12}{'p90':>12}{'p99':>12}{'max':>12}"


def table(summary: Summary) -> str:
    """One run's results; times in milliseconds."""
    lines = [
        _HEAD,
        _times("TTFT, ms", summary.ttft_seconds),
        _times("ITL, ms", summary.itl_seconds),
        _times("E2E, ms", summary.e2e_seconds),
        "",
        f"{'output':<18}{summary.output_tokens_per_second:>12,.1f} tokens/s for {summary.duration_seconds:,.1f} s",
        f"{'requests':<18}{summary.num_requests:>12,} ({_refused(summary)})",
        f"{'steps':<18}{summary.num_steps:>12,} ({summary.mixed_share:.1%} mixed)",
        f"{'prefix hits':<18}{summary.prefix_hit_ratio:>12.1%} of prompt tokens",
        f"{'preemptions':<18}{summary.num_preemptions:>12,} "
        f"({_recomputed(summary):.1%} of the prefill tokens were computed again)",
        f"{'starvation grants':<18}{summary.num_starvation_grants:>12,}",
    ]
    return "\n".join(lines)


def _refused(summary: Summary) -> str:
    refused = f"{summary.num_refused:,} refused"
    return f"{refused}, {summary.num_too_long:,} as longer than context or pool" if summary.num_too_long else refused


def _times(name: str, times: Percentiles) -> str:
    shown = (times.p50, times.p90, times.p99, times.max)
    return f"{name:<18}" + "".join(f"{seconds * 1e3:>12,.1f}" for seconds in shown)


def tenant_table(tenants: list[TenantSummary]) -> str:
    """What each tenant got; of many, the largest and the worst of the others. Times in milliseconds."""
    names = ("requests", "refused", "TTFT p50", "p99", "max", "ITL p50", "p99", "max", "of fair share")
    lines = [f"{'tenant':<18}" + "".join(f"{name:>14}" for name in names)]
    if len(tenants) <= MOST_TENANTS:
        return "\n".join([*lines, *(_tenant(str(each.tenant), [each]) for each in tenants)])
    first, *others = sorted(tenants, key=lambda each: -each.num_requests)
    lines += [_tenant(str(first.tenant), [first]), _tenant(f"{len(others)} others, worst", others)]
    return "\n".join(lines)


def _tenant(name: str, tenants: list[TenantSummary]) -> str:
    """Sums of the requests, and the worst of everything else."""
    counts = (sum(each.num_requests for each in tenants), sum(each.num_refused for each in tenants))
    times = [
        max(getattr(getattr(each, times), at) for each in tenants)
        for times in ("ttft_seconds", "itl_seconds")
        for at in ("p50", "p99", "max")
    ]
    shares = min(each.fair_share for each in tenants)
    return (
        f"{name:<18}"
        + "".join(f"{count:>14,}" for count in counts)
        + "".join(f"{seconds * 1e3:>14,.1f}" for seconds in times)
        + f"{shares:>14.1%}"
    )


def _recomputed(summary: Summary) -> float:
    return summary.prefill_tokens.recomputed / max(1, summary.prefill_tokens.computed)
