"""Rates and quantiles from two looks at `/metrics`."""

from __future__ import annotations

import pytest
from plait.live_view import INTER_TOKEN, quantile, read_values, view
from plait.top import lines

pytestmark = pytest.mark.unit

BEFORE = """# TYPE plait_steps counter
plait_steps_total{kind="decode"} 10
plait_step_tokens_total{phase="prefill"} 100
plait_step_tokens_total{phase="decode"} 40
plait_inter_token_seconds_bucket{le="0.01"} 5
plait_inter_token_seconds_bucket{le="0.1"} 5
plait_inter_token_seconds_bucket{le="+Inf"} 5
"""
NOW = """plait_steps_total{kind="decode"} 18
plait_steps_total{kind="mixed"} 2
plait_step_tokens_total{phase="prefill"} 300
plait_step_tokens_total{phase="decode"} 140
plait_requests_running 3
plait_requests_waiting 1
plait_kv_pages{state="free"} 7
plait_inter_token_seconds_bucket{le="0.01"} 95
plait_inter_token_seconds_bucket{le="0.1"} 103
plait_inter_token_seconds_bucket{le="+Inf"} 105
"""


def test_rates_are_those_between_the_looks() -> None:
    now = view(read_values(BEFORE), read_values(NOW), 2.0)
    assert (now.steps, now.prefill_tokens, now.decode_tokens) == (5.0, 100.0, 50.0)
    assert (now.prefill_tokens_a_step, now.decode_tokens_a_step) == (20.0, 10.0)
    assert (now.running, now.waiting, now.pages) == (3, 1, {"free": 7})
    assert (now.itl_p50, now.itl_p99, now.ttft_p50) == (0.01, 0.1, None)
    shown = "\n".join(lines("http://x", now))
    assert "3 running, 1 waiting" in shown
    assert "10.0 ms p50 and 100.0 ms p99 between tokens, - p50 to the first" in shown


def test_without_anything_between_there_is_no_quantile() -> None:
    values = read_values(NOW)
    assert quantile(values, values, INTER_TOKEN, 0.5) is None
    assert view(values, values, 1.0).prefill_tokens_a_step == 0.0
