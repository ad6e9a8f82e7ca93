"""What a late mask does to its request, in the plain model of the scheduler's rules."""

from __future__ import annotations

from collections.abc import Sequence

from plait_testing.scheduler_state import InFlight, Phase, Request


def leave_out(request: Request, in_flight: Sequence[InFlight], decoders: list[Request]) -> None:
    """A row's mask was late: its last token is computed again when the mask is there."""
    request.num_planned -= 1
    request.num_computed = request.num_known - 1
    for step in in_flight:
        for row in step.rows:
            row.is_void |= row.request is request
    if request.phase is not Phase.HELD:
        request.phase = Phase.AWAITING_MASK
        if request in decoders:
            decoders.remove(request)
    _resume(request, decoders)


def mask_ready(request: Request, decoders: list[Request]) -> None:
    """The mask that a row lacked is there; nothing happens to a request that holds no slot."""
    if request.phase not in (Phase.WAITING, Phase.PREEMPTED, Phase.FINISHED):
        request.has_late_mask = True
        _resume(request, decoders)


def _resume(request: Request, decoders: list[Request]) -> None:
    is_due = request.phase is Phase.AWAITING_MASK and request.has_late_mask
    if not is_due or request.num_rows_in_flight:
        return
    request.has_late_mask = False
    request.phase = Phase.DECODING if request.has_sampled else Phase.PREFILLING
    if request.has_sampled:
        decoders.append(request)
