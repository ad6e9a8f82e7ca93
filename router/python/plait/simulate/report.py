"""The simulator's report, and `summary.json`."""

from __future__ import annotations

import msgspec

from plait.simulate.settings import POISSON, SCENARIOS, LoadSettings, SimulateSettings


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles by nearest rank, in seconds."""

    p50: float
    p90: float
    p99: float
    max: float


class PrefillTokens(msgspec.Struct, frozen=True):
    """Prefill tokens of one run."""

    computed: int
    recomputed: int
    """Those of them that a preemption made necessary."""
    distinct: int
    """Of all prompts that arrived, those of equal prefixes counted once."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one run, all replicas together."""

    ttft_seconds: Percentiles
    """From arrival to first token."""
    itl_seconds: Percentiles
    """Between tokens of a request."""
    e2e_seconds: Percentiles
    """From arrival to last token."""
    output_tokens_per_second: float
    mixed_share: float
    """Share of the steps that both prefill and decode."""
    prefix_hit_ratio: float
    """Share of the prompt tokens that the prefix cache held."""
    prefill_tokens: PrefillTokens
    num_preemptions: int
    num_starvation_grants: int
    num_requests: int
    num_refused: int
    num_too_long: int
    """Refused requests that are longer than the context or the pool. The others found a full queue."""
    num_output_tokens: int
    num_steps: int
    duration_seconds: float
    """From the first arrival to the last token."""


class TenantSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant asked for and got."""

    tenant: int
    num_requests: int
    num_refused: int
    ttft_seconds: Percentiles
    itl_seconds: Percentiles
    num_served_tokens: int
    """Prompts with a first token, and output tokens, up to the last arrival."""
    num_fair_tokens: int
    """As many by max-min fairness, of all that was served up to then."""

    @property
    def fair_share(self) -> float:
        """Tokens served over those of max-min fairness."""
        return self.num_served_tokens / max(1, self.num_fair_tokens)


class Resolved(msgspec.Struct, frozen=True):
    """Settings that were left open, with the values used."""

    num_pages: int
    max_model_len: int
    watermark: int
    long_prefill_token_threshold: int


class Composition(msgspec.Struct, frozen=True, kw_only=True):
    """Steps over time, one value for each bin; shares are of the replicas' time."""

    bin_seconds: float
    prefill_tokens_per_second: list[float]
    decode_tokens_per_second: list[float]
    prefill_share: list[float]
    decode_share: list[float]
    mixed_share: list[float]


class Report(msgspec.Struct, frozen=True):
    """The simulator's report of a run."""

    summary: Summary
    tenants: list[TenantSummary]
    resolved: Resolved
    itl_tail: list[tuple[float, float]]
    """Share of gaps between tokens that are longer, and their length in seconds."""
    composition: Composition


def summary_json(settings: SimulateSettings, report: Report) -> bytes:
    """`summary.json`: the results and the settings, with the values used for those that were left open."""
    settings_json = {**_load_json(settings.load), **msgspec.to_builtins(settings.cluster)}
    settings_json |= {**msgspec.to_builtins(settings.scheduler), **msgspec.to_builtins(report.resolved)}
    figures = {"settings": settings_json, **msgspec.to_builtins(report.summary)}
    figures["tenants"] = msgspec.to_builtins(report.tenants)
    return msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n"


def _load_json(load: LoadSettings) -> dict[str, object]:
    """The load settings that the source heeds."""
    fields: dict[str, object] = msgspec.to_builtins(load)
    if load.trace in SCENARIOS:
        return {name: value for name, value in fields.items() if name not in ("input_len", "output_len")}
    if load.trace != POISSON:
        names = ("trace", "rate_scale") if load.tenants is None else ("trace", "rate_scale", "tenants", "seed")
        return {name: fields[name] for name in names}
    return fields
