"""The loop: take plans and masks, launch what can be launched, answer what is over.

A GPU gets the next plan while it computes this one. A plan that awaits masks is launched in two parts: the forward at
once, the sampling when the masks are here. The mask of a token follows from the token before it, so the loop answers
earlier steps meanwhile, and later plans wait.
"""

from __future__ import annotations

import logging
from collections import deque

from plait_proto import Bye, ForwardDone, Plan, StepMasks, encode

from plait_worker.device import num_driver_allocations
from plait_worker.link import Link
from plait_worker.masks import MaskInbox
from plait_worker.rank import Forward, InFlight, Rank
from plait_worker.step_profile import StepProfiler

_log = logging.getLogger(__name__)

_STEP_END_SECONDS = 50e-6
"""Between two looks for a step's end while no plan comes in: a hundredth of a short step."""
_ORDER_SECONDS = 0.1
"""Between two looks for the end of a profile whose steps do not come."""


def run(link: Link, rank: Rank, profiler: StepProfiler | None = None) -> None:
    """Compute and answer plans until Drain. Raises ``WorkerError`` if a plan or the link is broken."""
    in_flight, device = _StepsInFlight(link, rank, profiler), rank.slots.device
    before = num_driver_allocations(device)
    for message in link.messages(in_flight.complete_finished):
        in_flight.take(message)
    in_flight.complete_all()
    asked = num_driver_allocations(device) - before
    _log.info("drained: %s; the driver was asked for memory %d times", rank.totals, asked)
    link.send(encode(Bye(rank=rank.parallel.rank, num_steps=rank.totals.num_steps)))


class _StepsInFlight:
    """Steps that came and are not yet answered, oldest first."""

    def __init__(self, link: Link, rank: Rank, profiler: StepProfiler | None = None) -> None:
        self._link = link
        self._rank = rank
        self._profiler = profiler
        self._steps: deque[tuple[Plan, InFlight]] = deque()
        self._unsampled: tuple[Plan, Forward] | None = None
        """The step that awaits masks; the plans behind it wait."""
        self._plans: deque[Plan] = deque()
        self._masks = MaskInbox()
        self._has_told = False
        """The engine knows that the forward is done."""

    def take(self, message: Plan | StepMasks) -> None:
        """Launch what can be launched now."""
        if isinstance(message, StepMasks):
            self._masks.add(message)
        else:
            self._plans.append(message)
        while self._sample() or self._launch():
            # The next masks follow from this result: on a CPU the next forward would hold it back.
            self._answer_finished()

    def complete_finished(self) -> float | None:
        """Answer the steps that are over; the seconds to the next look if there is something to look for again."""
        self._answer_finished()
        if self._steps or self._computes_forward():
            return _STEP_END_SECONDS
        return _ORDER_SECONDS if self._profiler is not None and self._profiler.look() else None

    def complete_all(self) -> None:
        """Answer every step, waiting for each."""
        while self._steps:
            self._complete_oldest()

    def _answer_finished(self) -> None:
        while self._steps and self._steps[0][1].is_over():
            self._complete_oldest()

    def _sample(self) -> bool:
        """Launch the second part of the step that awaits masks; False if there is none, or they are not here."""
        if self._unsampled is None:
            return False
        plan, forward = self._unsampled
        masks = self._masks.take(plan.step)
        if masks is None:
            return False
        self._unsampled = None
        self._steps.append((plan, self._rank.sample(forward, masks)))
        return True

    def _launch(self) -> bool:
        """Launch the next plan, or its first part; False if there is none, or it waits."""
        if self._unsampled is not None or not self._plans:
            return False
        plan = self._plans.popleft()
        if self._profiler is not None:
            self._profiler.before_step(plan.step)
        if plan.awaits_masks:
            self._unsampled, self._has_told = (plan, self._rank.launch_forward(plan)), False
        else:
            self._steps.append((plan, self._rank.launch(plan)))
        return True

    def _computes_forward(self) -> bool:
        """Whether a forward that awaits masks is under way; once it is done, the engine is told."""
        if self._unsampled is None or self._has_told:
            return False
        plan, forward = self._unsampled
        if not forward.end.is_reached():
            return True
        # The masks may be here already.
        if not self._link.has_message():
            self._has_told = True
            if self._rank.sends_result(plan):
                self._link.send(encode(ForwardDone(plan.step)))
        return False

    def _complete_oldest(self) -> None:
        plan, oldest = self._steps.popleft()
        result = oldest.result()
        if plan.step == 0:
            self._rank.check_warm_up(result)
        self._rank.parallel.peers.check()
        if self._rank.sends_result(plan):
            self._link.send(encode(result))
        self._link.finished(plan.step)
        if self._profiler is not None:
            self._profiler.after_step(plan.step)
