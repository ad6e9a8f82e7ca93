"""Where the questions about one table go, of two replicas."""

from __future__ import annotations

from plait_testing import recall
from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server

MOST_TABLES = 20


def num_hits(running: Server) -> list[float]:
    """Prompt tokens that each replica had cached."""
    metrics = read_metrics(running.url)
    return [metrics[f'plait_prefix_hit_tokens_total{{replica="{replica}"}}'] for replica in (0, 1)]


def ask_about_one_table(
    running: Server, *, seed: int, num: int, context: int, model: str = "recall-gqa"
) -> list[float]:
    """Ask one after another, which must be answered right: the prompt tokens that each replica had cached.

    A replica whose heartbeat is late gets no questions; if one was, the next seed's table is asked about instead.
    """
    for each in range(seed, seed + MOST_TABLES):
        num_late, before = running.num_late, num_hits(running)
        asked = recall.about_one_table(each, num, context)
        assert recall.ask_all(running.url, asked, model=model, concurrency=1) == []
        if running.num_late == num_late:
            return [after - already for after, already in zip(num_hits(running), before, strict=True)]
    raise TimeoutError(running.errors)
