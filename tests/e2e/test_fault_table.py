"""Each fault of the fault table, struck once: nothing is lost, repeated, leaked or left."""

from __future__ import annotations

import os

import pytest
from bench.faults.fault_rows import LOSSES
from bench.faults.fault_table import FAULTS, measure
from plait_testing.held.sitecustomize import GARBAGE
from plait_testing.node_network import reason_without_namespaces
from plait_testing.shifted_clock import reason_without_compiler

GARBLED, FULL = "worker that answers garbage", "disk full"
NODES = ("partition between nodes", "half-open TCP between nodes")
NEEDS = {
    FULL: "" if os.geteuid() == 0 else "root mounts the disk",
    "clock jumps": reason_without_compiler(),
    **dict.fromkeys(NODES, reason_without_namespaces()),
}
NUM_RUNS = {GARBLED: len(GARBAGE), **dict.fromkeys(NODES, 2)}
STRUCK = {"poisoned request": ("losses", 2), "KV exhaustion": ("preemptions", 1), "rolling drain": ("answers", 8)}
"""What a row has at least if the fault has struck."""


@pytest.mark.parametrize(
    "name", [FULL, *(pytest.param(name, marks=pytest.mark.slow) for name in FAULTS if name != FULL)]
)
def test_a_fault_loses_nothing(name: str) -> None:
    if reason := NEEDS.get(name):
        pytest.skip(reason)
    row = measure(name, NUM_RUNS.get(name, 1))
    assert {loss: row[loss] for loss in LOSSES if row.get(loss)} == {}
    assert {"wrong_streams", "lost_tokens", "repeated_tokens"} <= row.keys()
    figure, least = STRUCK.get(name, ("runs", 1))
    assert float(str(row[figure])) >= least
