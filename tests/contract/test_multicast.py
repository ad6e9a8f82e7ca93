"""Nothing in the tree asks for NVLink multicast: on some shared hosts it takes every GPU out of service."""

from __future__ import annotations

import re
from pathlib import Path

from plait_testing import budgets

MULTICAST = re.compile("cuMulticast|multimem")
SOURCES = (".py", ".rs", ".cu", ".cuh", ".h", ".cpp", ".toml", ".sh")


def test_no_source_makes_a_multicast_object_or_reads_through_one() -> None:
    asking = [
        path for path in budgets.tracked(*SOURCES) if path != Path(__file__) and MULTICAST.search(path.read_text())
    ]
    assert asking == []


def test_the_libraries_that_would_choose_an_all_reduce_by_themselves_are_not_called() -> None:
    """flashinfer's workspaces and torch's symmetric memory make multicast objects by default."""
    choosing = re.compile(r"create_allreduce_fusion_workspace|_symmetric_memory|nvshmem(?!_DISABLE)")
    rooms = ("worker", "kernels", "router")
    product = [path for path in budgets.tracked(".py", ".cu") if relative(path).startswith(rooms)]
    assert [path for path in product if choosing.search(path.read_text())] == []


def relative(path: Path) -> str:
    return str(path.relative_to(budgets.ROOT))
