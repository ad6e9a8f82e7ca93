"""A profile of a rank's next steps, when an operator asks for one: a Chrome trace of what torch ran.

The engine's command line writes orders into the run directory (``plait_proto.profiles``). All ranks of a replica stop
after the same step, so that none waits in a collective for another that gathers its events.
"""

from __future__ import annotations

import logging
import mmap
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from plait_proto import ProfileOrder, RankProfile, WorkerConfig
from plait_proto.profiles import NUMBER, NUMBER_BYTES, read_order, write_rank_profile
from torch.profiler import ProfilerActivity, profile

from plait_worker.errors import first_line
from plait_worker.trace_file import write_trace

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    """A profile that has begun."""

    order: ProfileOrder
    profiler: profile
    first_step: int
    num_steps: int = 0


class StepProfiler:
    """Profiles steps as orders say. What goes wrong ends a profile, and never the rank."""

    def __init__(self, run_dir: Path, rank: int, replica: int) -> None:
        """An order that was given before now is not for this rank."""
        self._run_dir, self._rank, self._replica = run_dir, rank, replica
        with (run_dir / NUMBER).open("rb") as file:
            self._number = mmap.mmap(file.fileno(), NUMBER_BYTES, access=mmap.ACCESS_READ)
        self._seen = self._number[:]
        self._order: ProfileOrder | None = None
        """Until its steps have come."""
        self._running: _Running | None = None
        self._writer: threading.Thread | None = None
        """Of the last trace."""

    def before_step(self, step: int) -> None:
        """The step is about to be launched."""
        self.look()
        if self._order is None:
            return
        first = self._order.first_steps[self._replica]
        if step >= first + self._order.num_steps:
            self._finish(self._order)
        elif step >= first:
            self._count(self._order, step)

    def after_step(self, step: int) -> None:
        """The step is complete."""
        order = self._order
        if order is not None and step + 1 >= order.first_steps[self._replica] + order.num_steps:
            self._finish(order)

    def look(self) -> bool:
        """Take a new order if there is one; whether a profile runs."""
        if self._number[:] != self._seen:
            self._take_order()
        return self._running is not None

    def _take_order(self) -> None:
        if self._running is not None:
            self._finish(self._running.order)
        self._seen = self._number[:]
        order = read_order(self._run_dir)
        self._order = order if order.num_steps else None

    def _count(self, order: ProfileOrder, step: int) -> None:
        """The step is of the profile, and may be its first."""
        if self._running is None:
            self._begin(order, step)
        if self._running is not None:
            self._running.num_steps += 1

    def _begin(self, order: ProfileOrder, step: int) -> None:
        if self._writer is not None and self._writer.is_alive():
            self._order = None
            self._fail(order, "still writes the trace before; give a folder on a disk that takes it")
            return
        try:
            profiler = _new_profiler()
            profiler.start()
        except Exception as error:  # noqa: BLE001 (whatever a profiler meets, the rank serves on)
            self._order = None
            self._fail(order, _reason(error))
            return
        self._running = _Running(order, profiler, step)
        self._say(RankProfile(name=order.name, state="running"))

    def _finish(self, order: ProfileOrder) -> None:
        """Stop; a thread of its own then writes the trace, and steps go on."""
        running, self._running, self._order = self._running, None, None
        if running is None:
            self._fail(order, "its steps were over before this rank saw the order; ask for more steps")
            return
        try:
            running.profiler.stop()
        except Exception as error:  # noqa: BLE001 (as above)
            self._fail(order, _reason(error))
            return
        self._writer = threading.Thread(target=self._write, args=(running,), name="profile", daemon=True)
        self._writer.start()

    def _write(self, running: _Running) -> None:
        order = running.order
        name = f"{order.name}-rank-{self._rank}.json.gz"
        try:
            write_trace(running.profiler, Path(order.folder) / name)
        except Exception as error:  # noqa: BLE001 (as above)
            self._fail(order, _reason(error))
            return
        _log.info("wrote the profile of %d steps to %s", running.num_steps, name)
        first, count = running.first_step, running.num_steps
        self._say(RankProfile(name=order.name, state="written", file=name, first_step=first, num_steps=count))

    def _fail(self, order: ProfileOrder, reason: str) -> None:
        _log.warning("no profile: %s", reason)
        self._say(RankProfile(name=order.name, state="failed", reason=reason))

    def _say(self, profile: RankProfile) -> None:
        try:
            write_rank_profile(self._run_dir, self._rank, profile)
        except OSError as error:
            _log.warning("cannot tell the server of the profile: %s", error)


def open_profiler(config: WorkerConfig, rank: int) -> StepProfiler | None:
    """The profiler of a server that may ask for profiles; None if it never does."""
    run_dir = Path(config.run_dir)
    if not (run_dir / NUMBER).exists():
        return None
    _import_profiler()
    return StepProfiler(run_dir, rank, rank // config.parallel.world)


def _import_profiler() -> None:
    """Torch imports a second's worth of modules with the first profile: no stream is to wait for that."""
    with profile(activities=[ProfilerActivity.CPU]):
        pass


def _new_profiler() -> profile:
    """Of this thread's operators, and of the GPU's kernels if the rank has opened one."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
