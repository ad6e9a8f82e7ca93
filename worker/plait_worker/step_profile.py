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

_LATER = 16
"""By a multiple of so many steps begins a profile whose steps were over when the rank saw its order."""


@dataclass(slots=True)
class _Window:
    """The steps of an order, as this rank saw it."""

    order: ProfileOrder
    first: int
    """The number from which on they count; a group of replicas leaves numbers out."""
    num_left: int


@dataclass(slots=True)
class _Running:
    """A profile that has begun."""

    profiler: profile
    first_step: int
    last_step: int
    num_steps: int = 0


class StepProfiler:
    """Profiles steps as orders say. What goes wrong ends a profile, and never the rank."""

    def __init__(self, run_dir: Path, rank: int, replica: int) -> None:
        """An order that was given before now is not for this rank."""
        self._run_dir, self._rank, self._replica = run_dir, rank, replica
        with (run_dir / NUMBER).open("rb") as file:
            self._number = mmap.mmap(file.fileno(), NUMBER_BYTES, access=mmap.ACCESS_READ)
        self._seen = self._number[:]
        self._num_taken = 0
        """The newest order's number."""
        self._last_step = 0
        """That was launched."""
        self._window: _Window | None = None
        self._running: _Running | None = None
        self._writer: threading.Thread | None = None
        """Of the last trace."""

    def before_step(self, step: int) -> None:
        """The step is about to be launched."""
        self.look()
        if self._window is not None and step >= self._window.first:
            if self._window.num_left == 0:
                self._finish(self._window.order)
            else:
                self._count(self._window, step)
        self._last_step = step

    def after_step(self, step: int) -> None:
        """The step is complete."""
        window, running = self._window, self._running
        if window is not None and running is not None and window.num_left == 0 and step >= running.last_step:
            self._finish(window.order)

    def look(self) -> bool:
        """Take a new order if there is one; whether a profile runs."""
        if self._number[:] != self._seen:
            self._take_order()
        return self._running is not None

    def _take_order(self) -> None:
        self._seen = self._number[:]
        try:
            order = read_order(self._run_dir)
        except Exception as error:  # noqa: BLE001 (whatever is there, the rank serves on)
            _log.warning("an order for a profile cannot be read: %s", _reason(error))
            return
        if order.number == self._num_taken:  # it was there before its number
            return
        self._num_taken = order.number
        if self._window is not None:
            self._finish(self._window.order)
        self._window = self._window_of(order) if order.num_steps else None

    def _window_of(self, order: ProfileOrder) -> _Window:
        """One that is seen late ends as it does elsewhere; one that is over moves by some steps, alike everywhere."""
        first = order.first_steps[self._replica]
        num_missed = max(0, self._last_step - first + 1)
        if num_missed < order.num_steps:
            return _Window(order, first, order.num_steps - num_missed)
        return _Window(order, first - (-num_missed // _LATER) * _LATER, order.num_steps)

    def _count(self, window: _Window, step: int) -> None:
        """The step is of the profile, and may be its first."""
        if self._running is None and not self._begin(window.order, step):
            self._window = None
        if self._running is not None:
            self._running.num_steps += 1
            self._running.last_step = step
            window.num_left -= 1

    def _begin(self, order: ProfileOrder, step: int) -> bool:
        if self._writer is not None and self._writer.is_alive():
            self._fail(order, "still writes the trace before; give a folder on a disk that takes it")
            return False
        try:
            profiler = _new_profiler()
            profiler.start()
        except Exception as error:  # noqa: BLE001 (as above)
            self._fail(order, _reason(error))
            return False
        self._running = _Running(profiler, first_step=step, last_step=step)
        self._say(RankProfile(name=order.name, state="running"))
        return True

    def _finish(self, order: ProfileOrder) -> None:
        """Stop if it runs; a thread of its own then writes the trace, and steps go on."""
        running, self._running, self._window = self._running, None, None
        if running is None:
            return
        try:
            running.profiler.stop()
        except Exception as error:  # noqa: BLE001 (as above)
            self._fail(order, _reason(error))
            return
        self._writer = threading.Thread(target=self._write, args=(order, running), name="profile", daemon=True)
        self._writer.start()

    def _write(self, order: ProfileOrder, running: _Running) -> None:
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
