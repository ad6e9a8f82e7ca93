"""Generate deploy/grafana/plait.json: `python tools/generate_dashboard.py [--check]`.

The metrics and what they mean come from docs/metrics.md, which is generated from an engine's own page. Each metric of
that page is in a panel, and no panel names another one; the tests say so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METRICS = ROOT / "docs" / "metrics.md"
DASHBOARD = ROOT / "deploy" / "grafana" / "plait.json"
CHOSEN = 'job=~"$job",instance=~"$instance"'
"""Label matchers of the variables at the top of the dashboard."""
PERCENTILES = (0.5, 0.9, 0.99)
WIDTH, HEIGHT, PANELS_A_ROW = 8, 8, 3


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and how its series are called."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: its queries, and the unit as Grafana names it."""

    title: str
    unit: str
    queries: tuple[Query, ...]


def gauge(metric: str, *labels: str) -> Query:
    """Its sum, by labels."""
    return Query(_by(f"{metric}{{{CHOSEN}}}", labels), _legend(metric, labels))


def rate(metric: str, *labels: str) -> Query:
    """Its increase a second, by labels."""
    return Query(_by(_rate(metric), labels), _legend(metric, labels))


def group_rate(metric: str) -> Query:
    """The increase a second of what all engines of a group count alike, by job."""
    return Query(f"max by (job) ({_rate(metric)})", "{{job}}")


def ratio(part: str, whole: str, legend: str) -> Query:
    """The increase of one counter over another's."""
    return Query(f"sum({_rate(part)}) / sum({_rate(whole)})", legend)


def percentiles(histogram: str) -> tuple[Query, ...]:
    """Of a histogram, all servers together."""
    buckets = f"sum by (le) ({_rate(histogram + '_bucket')})"
    return tuple(Query(f"histogram_quantile({share:g}, {buckets})", f"p{share * 100:g}") for share in PERCENTILES)


def mean(histogram: str, label: str) -> Query:
    """Of a histogram, by a label."""
    total, count = (f"sum by ({label}) ({_rate(histogram + part)})" for part in ("_sum", "_count"))
    return Query(f"{total} / {count}", f"{{{{{label}}}}}")


def _rate(metric: str) -> str:
    return f"rate({metric}{{{CHOSEN}}}[$__rate_interval])"


def _by(expression: str, labels: tuple[str, ...]) -> str:
    return f"sum by ({', '.join(labels)}) ({expression})" if labels else f"sum({expression})"


def _legend(metric: str, labels: tuple[str, ...]) -> str:
    name = metric.removeprefix("plait_").removesuffix("_total").replace("_", " ")
    return ", ".join(f"{{{{{label}}}}}" for label in labels) or name


ROWS: dict[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel("Requests", "short", (gauge("plait_requests_running"), gauge("plait_requests_waiting"))),
        Panel("Finished", "reqps", (rate("plait_requests_finished_total", "reason"),)),
        Panel("Rejected", "reqps", (rate("plait_requests_rejected_total", "reason"),)),
        Panel("Tokens a second", "short", (rate("plait_generated_tokens_total"), rate("plait_prompt_tokens_total"))),
        Panel("Running, by server", "short", (gauge("plait_requests_running", "instance", "replica"),)),
        Panel("Waiting, by server", "short", (gauge("plait_requests_waiting", "instance", "replica"),)),
        Panel("Choices after the first of a prompt", "reqps", (rate("plait_further_choices_total"),)),
    ),
    "Latency": (
        Panel("Time to first token", "s", percentiles("plait_time_to_first_token_seconds")),
        Panel("Between tokens (ITL)", "s", percentiles("plait_inter_token_seconds")),
        Panel("Whole requests", "s", percentiles("plait_e2e_seconds")),
        Panel("In the queue", "s", percentiles("plait_queue_seconds")),
        Panel("First row to first token", "s", percentiles("plait_prefill_seconds")),
        Panel("First token to end", "s", percentiles("plait_decode_seconds")),
        Panel("Prompt tokens of a request", "short", percentiles("plait_request_prompt_tokens")),
        Panel("Output tokens of a request", "short", percentiles("plait_request_output_tokens")),
    ),
    "Steps": (
        Panel("Steps a second", "short", (rate("plait_steps_total", "kind"),)),
        Panel("Time of a step, mean", "s", (mean("plait_step_seconds", "kind"),)),
        Panel("Tokens computed a second", "short", (rate("plait_step_tokens_total", "phase"),)),
        Panel("Rows that waited for a later plan", "short", (rate("plait_carryover_total", "cause"),)),
        Panel(
            "Out of the ordinary, a second",
            "short",
            (
                rate("plait_step_hiccups_total"),
                rate("plait_starvation_grants_total"),
                rate("plait_itl_target_missed_total"),
                rate("plait_itl_target_waits_total"),
            ),
        ),
        Panel("Step-time model", "s", (gauge("plait_step_model_seconds", "instance", "term"),)),
        Panel("Margin of the step-time model", "percentunit", (gauge("plait_step_model_margin_ratio", "instance"),)),
    ),
    "KV pages": (
        Panel("Pages", "short", (gauge("plait_kv_pages", "state"),)),
        Panel("Snapshots of slot state", "short", (gauge("plait_kv_snapshots", "state"),)),
        Panel("Bytes of a cached token, a slot, a snapshot", "bytes", (gauge("plait_kv_cache_bytes", "of"),)),
        Panel("Share that requests hold", "percentunit", (gauge("plait_kv_usage_ratio", "instance", "replica"),)),
        Panel(
            "Prompt tokens found in the prefix cache",
            "percentunit",
            (ratio("plait_prefix_hit_tokens_total", "plait_prefix_query_tokens_total", "cached"),),
        ),
        Panel("Preemptions a second", "short", (rate("plait_preemptions_total"),)),
        Panel("Evictions a second", "short", (rate("plait_prefix_evictions_total"),)),
    ),
    "Constrained answers": (
        Panel("Constrained requests", "reqps", (rate("plait_constrained_requests_total", "kind"),)),
        Panel("Grammars a second", "short", (rate("plait_grammars_total", "result"),)),
        Panel("Compiling a grammar", "s", percentiles("plait_grammar_compile_seconds")),
        Panel("Filling a mask", "s", percentiles("plait_mask_seconds")),
        Panel("Late masks a second", "short", (rate("plait_late_masks_total"),)),
        Panel("Tool calls a second", "short", (rate("plait_tool_calls_total", "outcome"),)),
    ),
    "Front door": (
        Panel("Answers by path and status", "reqps", (rate("plait_http_answers_total", "path", "status"),)),
        Panel("Event loop's lag", "s", percentiles("plait_event_loop_lag_seconds")),
        Panel("Bytes untaken", "bytes", (gauge("plait_untaken_bytes", "instance", "reader"),)),
        Panel("Requests of each key", "reqps", (rate("plait_key_requests_total", "key"),)),
        Panel("Tokens of each key a second", "short", (rate("plait_key_tokens_total", "key", "of"),)),
    ),
    "Links": (
        Panel(
            "Group's steps a second", "short", (group_rate("plait_group_step"), rate("plait_group_dummy_steps_total"))
        ),
        Panel("Malformed messages a second", "short", (rate("plait_link_malformed_total"),)),
        Panel("Replicas without ranks", "short", (gauge("plait_replica_down", "instance", "replica"),)),
        Panel(
            "Losses of ranks, and requests that went on, a second",
            "short",
            (
                rate("plait_rank_losses_total"),
                rate("plait_requests_replayed_total"),
                rate("plait_requests_moved_total"),
            ),
        ),
        Panel(
            "API keys, and whether their file is refused",
            "short",
            (gauge("plait_api_keys", "instance"), gauge("plait_api_key_file_refused", "instance")),
        ),
        Panel("Served models", "short", (gauge("plait_server_info", "model", "page_size"),)),
        Panel("Changes of the API key file a second", "short", (rate("plait_api_key_file_changes_total"),)),
        Panel("KV events published a second", "short", (rate("plait_kv_event_messages_total"),)),
    ),
}


def metrics() -> dict[str, str]:
    """Each metric of docs/metrics.md with its meaning."""
    rows = re.findall(r"^\| `(plait_\w+)` \|[^|]*\|[^|]*\| (.*) \|$", METRICS.read_text(), re.MULTILINE)
    return dict(rows)


def named(expression: str) -> set[str]:
    """The metrics of a query, a histogram's series by the histogram's name."""
    known = metrics()
    found = re.findall(r"plait_\w+", expression)
    histograms = {series: re.sub(r"_(bucket|sum|count)$", "", series) for series in found}
    return {series if series in known else histograms[series] for series in found}


def dashboard() -> dict[str, object]:
    """The whole document, as Grafana imports it."""
    return {
        "uid": "plait",
        "title": "Plait",
        "tags": ["plait"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source_variable(), _variable("job"), _variable("instance")]},
        "panels": list(_panels()),
    }


def _source_variable() -> dict[str, object]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _variable(label: str) -> dict[str, object]:
    matchers = '{job=~"$job"}' if label == "instance" else ""
    return {
        "name": label,
        "type": "query",
        "label": label.capitalize(),
        "datasource": _source(),
        "query": {"query": f"label_values(plait_requests_running{matchers}, {label})", "refId": label},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}


def _panels() -> Iterator[dict[str, object]]:
    number, top = 1, 0
    for title, panels in ROWS.items():
        place = {"x": 0, "y": top, "w": WIDTH * PANELS_A_ROW, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        number, top = number + 1, top + 1
        for index, panel in enumerate(panels):
            line, column = divmod(index, PANELS_A_ROW)
            place = {"x": column * WIDTH, "y": top + line * HEIGHT, "w": WIDTH, "h": HEIGHT}
            yield _panel(number, panel, place)
            number += 1
        top += -(-len(panels) // PANELS_A_ROW) * HEIGHT


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, object]:
    known = metrics()
    shown = sorted(set().union(*(named(query.expression) for query in panel.queries)))
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": "\n".join(f"{metric}: {known[metric]}" for metric in shown),
        "datasource": _source(),
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query.expression, "legendFormat": query.legend}
            for index, query in enumerate(panel.queries)
        ],
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


def main(argv: list[str]) -> int:
    """Write the file, or compare it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file is out of date")
    if parser.parse_args(argv).check:
        return int(DASHBOARD.read_text() != text())
    DASHBOARD.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
