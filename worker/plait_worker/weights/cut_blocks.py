"""Which matrices cannot stay in blocks, because ranks cut those or because experts are stacked: told from headers."""

from __future__ import annotations

import re
from collections import defaultdict

from plait_kernels.linear.blocks import KINDS, PANEL

from plait_worker.weights.source import TensorSource

_DOWN = (".down_proj.weight", ".w2.weight")
"""Matrices whose inputs are divided evenly among the ranks."""
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.")


def dense_names(source: TensorSource, world: int, *, whole_experts: bool = False) -> frozenset[str]:
    """Matrices in blocks that a rank of ``world`` holds dense all the same; experts of a layer are held alike."""
    kinds = {name: source.block_kind(name) for name in source.names}
    kept = {name for name, kind in kinds.items() if kind is not None}
    cut = {name for name in kept if _is_cut(source.shape(name)[1], str(kinds[name]), name, world)}
    stacks = defaultdict[str, list[str]](list)
    for name in kinds:
        if (found := _EXPERT.match(name)) and name.endswith(".weight"):
            stacks[found[1]].append(name)
            cut.discard(name)
    for names in stacks.values():
        num_ranks = 1 if whole_experts else world
        if not all(_expert_stays(source.shape(name), kinds[name], name, num_ranks) for name in names):
            cut.update(kept.intersection(names))
    return frozenset(cut)


def _expert_stays(shape: tuple[int, ...], kind: str | None, name: str, world: int) -> bool:
    """Gates and ups end with a panel on each rank, and downs are cut between blocks."""
    if kind is None:
        return False
    return not _is_cut(shape[1], kind, name, world) if name.endswith(_DOWN) else shape[0] % (PANEL * world) == 0


def _is_cut(num_inputs: int, kind: str, name: str, world: int) -> bool:
    """Whether a rank's inputs begin or end within a block."""
    return name.endswith(_DOWN) and num_inputs % (KINDS[kind].inputs * world) != 0
