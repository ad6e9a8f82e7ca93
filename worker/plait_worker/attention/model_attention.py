"""The attention of a whole model: one backend for each distinct spec of its layers.

A layer uses the backend of its spec, by an index that is bound when the model is loaded. With one spec a step costs the
host what that spec's backend costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait_worker.attention.backend import AttentionBackend, CapturedPrefill
from plait_worker.graph_sizes import GraphSize
from plait_worker.rows import Rows


@dataclass(frozen=True, slots=True)
class ModelAttention:
    """At least one backend, in the order of ``spec.distinct``."""

    backends: Sequence[AttentionBackend[Any]]

    @property
    def name(self) -> str:
        """As ``--attention-backend`` spells it; several names are joined."""
        return " and ".join(dict.fromkeys(backend.name for backend in self.backends))

    @property
    def uses_torch(self) -> bool:
        """Whether torch attends somewhere: it copies pages, and on a CPU it needs threads."""
        return any(backend.name == "torch" for backend in self.backends)

    @property
    def is_capturable(self) -> bool:
        """Whether every backend's decode steps can be captured."""
        return all(backend.is_capturable for backend in self.backends)

    @property
    def captured_prefill(self) -> CapturedPrefill | None:
        """How prefill rows go in captured steps; None if one of the backends captures only decode rows."""
        prefill = [backend.captured_prefill for backend in self.backends]
        known = [each for each in prefill if each is not None]
        if len(known) < len(prefill):
            return None
        return known[0] if len(known) == 1 else JointPrefill(known)

    def prepare(self, rows: Rows) -> tuple[Any, ...]:
        """The host's work for one step: what each backend prepares, in the same order."""
        return tuple(backend.prepare(rows) for backend in self.backends)


@dataclass(frozen=True, slots=True)
class JointPrefill:
    """``CapturedPrefill`` of several backends: one graph serves them all."""

    members: Sequence[CapturedPrefill]

    @property
    def contexts(self) -> Sequence[int]:
        """Of all members."""
        return sorted({context for member in self.members for context in member.contexts})

    def choose(self, fitting: Sequence[GraphSize], starts: Sequence[int], lengths: Sequence[int]) -> GraphSize | None:
        """The largest of the members' choices; None if one of them makes none."""
        chosen = [member.choose(fitting, starts, lengths) for member in self.members]
        known = [size for size in chosen if size is not None]
        return max(known, key=fitting.index) if len(known) == len(chosen) else None

    def plan(self, size: GraphSize, starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Each member plans."""
        for member in self.members:
            member.plan(size, starts, lengths)
