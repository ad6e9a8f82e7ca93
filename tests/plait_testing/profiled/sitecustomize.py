"""Python reads this at its start if its folder is on the path. It profiles some steps of a worker when it is asked to.

``PLAIT_TEST_PROFILE`` names a file. Once it is there, the next `NUM_STEPS` steps are profiled, the trace is written to
``FILE.trace.json``, and the file is removed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

NUM_STEPS = 60


class StepProfile:
    """Counts steps while a profiler runs."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.profiler: Any = None
        self.num_left = 0

    def begin_step(self) -> None:
        """A step is about to be launched."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        if self.profiler is not None:
            self.num_left -= 1
            if self.num_left == 0:
                torch.cuda.synchronize() if torch.cuda.is_available() else None
                self.profiler.stop()
                self.profiler.export_chrome_trace(self.file + ".trace.json")
                self.profiler = None
                os.unlink(self.file)
        elif os.path.exists(self.file):
            activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
            self.profiler, self.num_left = profile(activities=activities), NUM_STEPS
            self.profiler.start()

    def launched(self, launch: Callable[[Any, Any], Any], name: str) -> Callable[[Any, Any], Any]:
        """``Rank.launch`` and ``Rank.launch_forward``."""
        from torch.profiler import record_function

        def counted(rank: Any, plan: Any) -> Any:
            self.begin_step()
            with record_function(name):
                return launch(rank, plan)

        return counted


def named(work: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same, as a range of the trace."""
    from torch.profiler import record_function

    def within(*given: Any) -> Any:
        with record_function(name):
            return work(*given)

    return within


if "plait_worker" in sys.orig_argv and (wanted := os.environ.get("PLAIT_TEST_PROFILE")):
    from plait_worker.rank import InFlight, Rank

    _profile = StepProfile(wanted)
    Rank.launch = _profile.launched(Rank.launch, "host: whole step")  # type: ignore[method-assign, assignment]
    Rank.launch_forward = _profile.launched(Rank.launch_forward, "host: forward")  # type: ignore[method-assign, assignment]
    Rank.sample = named(Rank.sample, "host: sampling")  # type: ignore[method-assign]
    InFlight.result = named(InFlight.result, "host: landing")  # type: ignore[method-assign]
