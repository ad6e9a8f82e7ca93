"""Settings of `/metrics`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from plait.setting import Setting

MetricNames = Literal["plait", "plait,vllm"]


class MetricsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics."""

    metric_names: Annotated[
        MetricNames,
        Setting(
            "names on /metrics; plait,vllm adds those of vLLM's metrics that have ours as their values, for "
            "dashboards, autoscalers and gateways that read them"
        ),
    ] = "plait"
