"""Which of several failures is the root cause: the others follow from it, and may be heard of first."""

from __future__ import annotations

import re
from collections.abc import Iterator

from plait_proto import ExitCode

from plait.nodes.layout import Layout
from plait.nodes.messages import Cause

_ENGINES = re.compile(r"\bengine (\d+)\b")
_GAVE_UP = re.compile(r"\bengine \d+ gave up\b")
_RANK = re.compile(r"^rank (\d+)\b")
_OWN = (ExitCode.SETTINGS, ExitCode.HARDWARE, ExitCode.MODEL_FILES)


def gave_up(cause: Cause) -> bool:
    """Whether it is what an engine told before it ended: that engine's own cause, with its exit code, is to come."""
    return _GAVE_UP.search(cause.reason) is not None


class Causes:
    """Failures by node, in the order in which they were heard of."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._causes: dict[int, Cause] = {}

    def add(self, node: int, cause: Cause) -> None:
        """The first cause of a node counts."""
        self._causes.setdefault(node, cause)

    def __contains__(self, node: int) -> bool:
        return node in self._causes

    def __iter__(self) -> Iterator[int]:
        return iter(self._causes)

    def __len__(self) -> int:
        return len(self._causes)

    def blamed_node(self, cause: Cause, node: int) -> int | None:
        """The other node whose engine, or whose rank of the head's engine, the cause of `node` names."""
        named = {int(number) for number in _ENGINES.findall(cause.reason)}
        if self._layout.spans_nodes and not cause.is_report and (rank := _RANK.match(cause.reason)):
            named = {self._layout.node_of(int(rank.group(1)))}
        named -= {node}
        return named.pop() if len(named) == 1 else None

    def root(self) -> tuple[int, Cause]:
        """The node and its cause."""
        for node, cause in self._causes.items():
            if cause.code in _OWN and self.blamed_node(cause, node) is None:
                return node, cause
        node, cause = min(self._causes.items(), key=lambda one: one[1].is_report)
        seen = {node}
        while (blamed := self.blamed_node(cause, node)) is not None and blamed in self._causes and blamed not in seen:
            if self._causes[blamed].is_report:
                break
            node, cause = blamed, self._causes[blamed]
            seen.add(node)
        return node, cause
