"""Caches in which nothing that a step may not read is right, and which show what it wrote.

Before a step its new pages, its new slots' state, the snapshots that it saves to and the raw keys of the step before
are overwritten with large values. Behind it everything but these, its rows' last pages and its rows' slots must be as
it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from plait_worker.cache import KVCache
from plait_worker.rows import Rows
from torch import Tensor

POISON = 1e4
"""Finite: a masked probability of 0 times it is 0."""


@dataclass(frozen=True)
class _Kept:
    """Entries of a tensor that the step may not write."""

    name: str
    tensor: Tensor
    before: Tensor
    index: Tensor

    @classmethod
    def of(cls, name: str, tensor: Tensor, written: Iterable[int], num_entries: int) -> _Kept:
        index = torch.tensor(sorted(set(range(num_entries)) - set(written)), dtype=torch.int64)
        return cls(name, tensor, tensor[index].clone(), index)

    def check(self) -> None:
        changed = (self.tensor[self.index] != self.before).flatten(1).any(dim=1)
        assert not changed.any(), f"the step wrote to {self.name} {int(self.index[changed][0])}"


class PoisonedStep:
    """One step over a cache; made before it runs."""

    def __init__(self, cache: KVCache, rows: Rows) -> None:
        self._kept = [*_poison_pages(cache, rows), *_poison_states(cache, rows)]

    def check(self) -> None:
        """Raise ``AssertionError`` if the step wrote where it may not."""
        for each in self._kept:
            each.check()


def _poison_pages(cache: KVCache, rows: Rows) -> Iterator[_Kept]:
    size, table = cache.page_size, rows.page_table_RW.tolist()
    new, written = set[int](), set[int]()
    for pages, start, length in zip(table, rows.starts, rows.lengths, strict=True):
        new.update(pages[-(-start // size) : -(-(start + length) // size)])
        written.update(pages[start // size : -(-(start + length) // size)])
    for layer in (*cache.layers, *cache.index_keys):
        layer[sorted(new)] = POISON
        yield _Kept.of("page", layer, written, cache.num_pages)


def _poison_states(cache: KVCache, rows: Rows) -> Iterator[_Kept]:
    begun = [slot for slot, start in zip(rows.slots, rows.starts, strict=True) if start == 0]
    at_boundary = [slot for slot, start in zip(rows.slots, rows.starts, strict=True) if start % cache.page_size == 0]
    saved = [save.snapshot for save in rows.saves]
    for state in cache.states:
        rings = state.rings()
        rings[begun], state.last[begun], state.sums[at_boundary] = POISON, POISON, POISON
        state.raw[: state.layout.num_staged] = POISON
        state.saved_rings[saved], state.saved_last[saved] = POISON, POISON
        num_slots = len(rings) - 1
        for tensor in (rings, state.last, state.sums):
            yield _Kept.of("slot", tensor, rows.slots, num_slots)
        for tensor in (state.saved_rings, state.saved_last):
            yield _Kept.of("snapshot", tensor, saved, cache.num_snapshots)
