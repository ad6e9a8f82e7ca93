"""Logs of servers with `--log-json`."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

LEVELS = {"DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"}


def read_json_lines(log: str) -> list[dict[str, Any]]:
    """The objects of all lines; each must be one that has what every line has."""
    lines = [json.loads(line) for line in log.splitlines()]
    for line in lines:
        assert datetime.fromisoformat(line["time"]).tzinfo is not None
        assert line["level"] in LEVELS
        assert isinstance(line["source"], str)
        assert isinstance(line["message"], str)
    return lines
