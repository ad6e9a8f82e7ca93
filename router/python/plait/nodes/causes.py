"""Which of several failures is the root cause: the others follow from it, and may be heard of first."""

from __future__ import annotations

import re
from collections.abc import Mapping

from plait_proto import ExitCode

from plait.nodes.messages import Cause

_BLAMES = re.compile(r"\bengine (\d+)\b")
_OWN = (ExitCode.SETTINGS, ExitCode.HARDWARE, ExitCode.MODEL_FILES)


def blamed_node(cause: Cause, node: int) -> int | None:
    """The other node whose engine the cause names; engines have the numbers of their nodes."""
    named = {int(number) for number in _BLAMES.findall(cause.reason)} - {node}
    return named.pop() if len(named) == 1 else None


def root_cause(causes: Mapping[int, Cause]) -> tuple[int, Cause]:
    """The node and its cause, from the failures by node in the order in which they were heard of."""
    for node, cause in causes.items():
        if cause.code in _OWN and blamed_node(cause, node) is None:
            return node, cause
    node, cause = next(iter(causes.items()))
    seen = {node}
    while (blamed := blamed_node(cause, node)) in causes and blamed is not None and blamed not in seen:
        node, cause = blamed, causes[blamed]
        seen.add(node)
    return node, cause
