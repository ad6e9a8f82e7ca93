"""A server's Prometheus text, read as numbers."""

from __future__ import annotations

import re
from collections import defaultdict

import httpx

_OF_REPLICA = re.compile(r'replica="\d+",?')


def read_metrics(url: str) -> dict[str, float]:
    """Every sample of `/metrics` by its full name, labels included; comments and timestamps left out."""
    return parse_metrics(httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text)


def parse_metrics(text: str) -> dict[str, float]:
    """As `read_metrics`."""
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}


def sum_over_replicas(samples: dict[str, float]) -> dict[str, float]:
    """The samples without the label `replica`, those of all replicas added up."""
    summed: defaultdict[str, float] = defaultdict(float)
    for name, value in samples.items():
        summed[_OF_REPLICA.sub("", name).replace("{}", "")] += value
    return dict(summed)
