"""A server's Prometheus text, read as numbers."""

from __future__ import annotations

import httpx


def read_metrics(url: str) -> dict[str, float]:
    """Every sample of `/metrics` by its full name, labels included; comments and timestamps left out."""
    text = httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}
