"""The results as text."""

from __future__ import annotations

from plait.simulate.report import Percentiles, Summary

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
        f"{'preemptions':<18}{summary.num_preemptions:>12,}",
        f"{'starvation grants':<18}{summary.num_starvation_grants:>12,}",
    ]
    return "\n".join(lines)


def _refused(summary: Summary) -> str:
    refused = f"{summary.num_refused:,} refused"
    return f"{refused}, {summary.num_too_long:,} as longer than context or pool" if summary.num_too_long else refused


def _times(name: str, times: Percentiles) -> str:
    shown = (times.p50, times.p90, times.p99, times.max)
    return f"{name:<18}" + "".join(f"{seconds * 1e3:>12,.1f}" for seconds in shown)
