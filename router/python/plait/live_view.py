"""What happens now, from two looks at `/metrics`: for the live page and `plait top`."""

from __future__ import annotations

import re

import msgspec

_SAMPLE = re.compile(r"^(\w+)(\{[^}]*\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
INTER_TOKEN = "plait_inter_token_seconds_bucket"
FIRST_TOKEN = "plait_time_to_first_token_seconds_bucket"

Labels = tuple[tuple[str, str], ...]
Values = dict[str, dict[Labels, float]]


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One moment; rates are those since the look before it."""

    prefill_tokens: float
    """A second."""
    decode_tokens: float
    """A second."""
    steps: float
    """A second."""
    prefill_tokens_a_step: float
    decode_tokens_a_step: float
    running: int
    waiting: int
    pages: dict[str, int]
    """By their state."""
    itl_p50: float | None
    """Seconds between tokens; None without any."""
    itl_p99: float | None
    ttft_p50: float | None
    """Seconds."""
    finished: float
    """Requests a second."""


def read_values(text: str) -> Values:
    """The samples of an OpenMetrics page, by name and labels."""
    values: Values = {}
    for name, labels, value in _SAMPLE.findall(text):
        values.setdefault(name, {})[tuple(_LABEL.findall(labels))] = float(value)
    return values


def view(before: Values, now: Values, seconds: float) -> View:
    """What has happened in between."""
    steps = _sum(now, "plait_steps_total") - _sum(before, "plait_steps_total")
    tokens = {phase: _grown(before, now, "plait_step_tokens_total", phase) for phase in ("prefill", "decode")}
    finished = _sum(now, "plait_requests_finished_total") - _sum(before, "plait_requests_finished_total")
    return View(
        prefill_tokens=tokens["prefill"] / seconds,
        decode_tokens=tokens["decode"] / seconds,
        steps=steps / seconds,
        prefill_tokens_a_step=tokens["prefill"] / steps if steps else 0.0,
        decode_tokens_a_step=tokens["decode"] / steps if steps else 0.0,
        running=int(_sum(now, "plait_requests_running")),
        waiting=int(_sum(now, "plait_requests_waiting")),
        pages=_pages(now),
        itl_p50=quantile(before, now, INTER_TOKEN, 0.5),
        itl_p99=quantile(before, now, INTER_TOKEN, 0.99),
        ttft_p50=quantile(before, now, FIRST_TOKEN, 0.5),
        finished=finished / seconds,
    )


def quantile(before: Values, now: Values, name: str, share: float) -> float | None:
    """The upper bound of the histogram's bucket that has this quantile of what came in between; None if nothing did.

    What lies above the last bound counts as that bound.
    """
    counts: dict[float, float] = {}
    for labels, value in now.get(name, {}).items():
        bound = float(dict(labels)["le"])
        counts[bound] = counts.get(bound, 0.0) + value - before.get(name, {}).get(labels, 0.0)
    total = max(counts.values(), default=0.0)
    if total <= 0:
        return None
    within = [bound for bound, count in counts.items() if count >= share * total]
    finite = [bound for bound in counts if bound != float("inf")]
    return min(min(within), max(finite))


def _sum(values: Values, name: str) -> float:
    return sum(values.get(name, {}).values())


def _grown(before: Values, now: Values, name: str, phase: str) -> float:
    def of_phase(values: Values) -> float:
        return sum(value for labels, value in values.get(name, {}).items() if ("phase", phase) in labels)

    return of_phase(now) - of_phase(before)


def _pages(now: Values) -> dict[str, int]:
    pages: dict[str, int] = {}
    for labels, value in now.get("plait_kv_pages", {}).items():
        state = dict(labels)["state"]
        pages[state] = pages.get(state, 0) + int(value)
    return pages
