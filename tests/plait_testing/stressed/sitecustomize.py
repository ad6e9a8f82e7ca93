"""Python reads this at its start if its folder is on the path. It slows a GPU worker down and fills its unused pages.

Every element of the cache that no request has written is large, and must stay so. A kernel that spins for 20 ms comes
before each step, so that the host runs two plans ahead. The host sleeps at random. The worker ends with an error if an
element was written that no plan names. The dummy page is exempt: rows that pad a step write there.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

UNWRITTEN = 1000.0
SPIN_SECONDS = 0.020
LONGEST_DELAY_SECONDS = 0.004
# Steps between two looks at what the checks have counted so far.
LOOK_EVERY = 50


class Warden:
    """Overwrites pages as they change hands, and counts elements of a page's unwritten tail that have changed."""

    def __init__(self, rank: Any) -> None:
        import torch

        self.torch = torch
        self.rank = rank
        self.faults = torch.zeros((), dtype=torch.int64, device=rank.slots.device)
        self.is_leased = torch.zeros(rank.cache.num_pages + 1, dtype=torch.bool, device=rank.slots.device)
        self.pages: dict[int, list[int]] = {}
        self.reached: dict[int, int] = {}
        """Tokens that each slot has written; a row that is left out for want of its mask writes its last one again."""
        self.num_steps = 0
        self.cycles_per_second = self._measure_cycles()
        self._fill(torch.arange(rank.cache.num_pages + 1, device=rank.slots.device))

    def before(self, inputs: Any) -> None:
        """Spin, and overwrite the pages that the step's slots are given, but those that others have computed."""
        self.torch.cuda._sleep(int(SPIN_SECONDS * self.cycles_per_second))
        for slot in [*inputs.freed_F.tolist(), *(new.slot for new in inputs.new_slots)]:
            self.pages.pop(slot, None)
            self.reached.pop(slot, None)
        starts = dict(zip(inputs.slots_R.tolist(), inputs.starts_R.tolist(), strict=True))
        unwritten = []
        for slot, page in inputs.appended_A2.tolist():
            pages = self.pages.setdefault(slot, [])
            pages.append(page)
            if len(pages) * self.rank.cache.page_size > starts.get(slot, 0):
                unwritten.append(page)
        given = self._upload(np.array(unwritten, dtype=np.int64))
        if len(given):
            self._fill(given)
            self.is_leased[given] = True

    def after(self) -> None:
        """After the step: the last page of each request has its tail, and free pages are untouched."""
        self.num_steps += 1
        self._count_tails()
        if self.num_steps % LOOK_EVERY:
            return
        never = ~self.is_leased
        never[-1] = False
        for layer in self.rank.cache.layers:
            self.faults += (layer[never].float() != UNWRITTEN).sum()
        if int(self.faults):
            raise RuntimeError(f"{int(self.faults)} elements of the cache were written that no plan names")

    def _count_tails(self) -> None:
        slots, page_size = self.rank.slots, self.rank.cache.page_size
        for slot in self.pages:
            self.reached[slot] = max(self.reached.get(slot, 0), int(slots._num_computed_N[slot]))
        live = [(pages, self.reached[slot]) for slot, pages in self.pages.items()]
        cut = [(pages[done // page_size], done % page_size) for pages, done in live if done // page_size < len(pages)]
        if not cut:
            return
        pages, offsets = self._upload(np.array(cut)).unbind(1)
        is_tail = self.torch.arange(page_size, device=self.faults.device) >= offsets[:, None]
        for layer in self.rank.cache.layers[:: max(1, len(self.rank.cache.layers) // 2)]:
            is_changed = layer[pages].float() != UNWRITTEN  # a page's tokens are the last axis but one
            of_page = is_tail.view(len(is_tail), *[1] * (layer.ndim - 3), page_size, 1)
            self.faults += (is_changed & of_page).sum()

    def _upload(self, values: Any) -> Any:
        """Without waiting for the device: the host is to run ahead."""
        from plait_worker.transfer import upload

        return upload(np.ascontiguousarray(values), self.faults.device)

    def _fill(self, pages: Any) -> None:
        for layer in self.rank.cache.layers:
            layer.index_fill_(0, pages, UNWRITTEN)

    def _measure_cycles(self) -> float:
        cycles = 50_000_000
        self.torch.cuda.synchronize()
        began = time.perf_counter()
        self.torch.cuda._sleep(cycles)
        self.torch.cuda.synchronize()
        return cycles / (time.perf_counter() - began)


class Stress:
    """Wraps a rank's methods with the warden's checks and delays."""

    def __init__(self) -> None:
        self.wardens: list[Warden] = []
        self.choose = random.Random(0)

    def slow(self, launch: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """``Rank.launch`` and ``Rank.launch_forward``."""
        from plait_worker.step_inputs import read_plan

        def slowed(rank: Any, plan: Any) -> Any:
            if not self.wardens:
                self.wardens.append(Warden(rank))
            self.wardens[0].before(read_plan(plan))
            launched = launch(rank, plan)
            self.wardens[0].after()
            self._sleep()
            return launched

        return slowed

    def late(self, sample: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
        """``Rank.sample``, which comes when a step's masks are there."""

        def delayed(rank: Any, forward: Any, messages: Any) -> Any:
            self._sleep()
            return sample(rank, forward, messages)

        return delayed

    def _sleep(self) -> None:
        time.sleep(self.choose.random() * LONGEST_DELAY_SECONDS)


if "plait_worker" in sys.orig_argv:
    from plait_worker.rank import Rank

    _stress = Stress()
    Rank.launch = _stress.slow(Rank.launch)  # type: ignore[method-assign, assignment]
    Rank.launch_forward = _stress.slow(Rank.launch_forward)  # type: ignore[method-assign, assignment]
    Rank.sample = _stress.late(Rank.sample)  # type: ignore[method-assign, assignment]
