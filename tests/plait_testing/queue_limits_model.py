"""Who may join a queue that is full, and who leaves it for a newcomer."""

from __future__ import annotations

from itertools import takewhile

from plait.settings import SchedulerSettings

from plait_testing.scheduler_state import Ask, Phase, Request

QUEUE_PARTS = 1 << 16
"""Loads of lanes count in so many parts, so that they can be divided by weights."""


def displaced_by(
    queued: list[Request], ask: Ask, limits: SchedulerSettings, lane_weights: dict[int, int] | None
) -> list[Request] | str:
    """Who must leave a full queue for a newcomer: nobody if it has room, a refusal if nobody has to.

    `lane_weights` are tenants' weights; None unless the policy is fair share.
    """
    num_over = len(queued) + ask.num_choices - limits.max_queue
    num_tokens_over = sum(it.num_queue_tokens for it in queued) + len(ask.prompt) - limits.max_queue_tokens
    if not queued or (num_over <= 0 and num_tokens_over <= 0):
        return []
    refusal = "QueueFull" if num_over > 0 else "QueueTokensFull"
    if lane_weights is None:
        return refusal

    def share(requests: list[Request], more: Ask | None = None) -> int:
        """A lane's share of the limit that is exceeded."""
        load = len(requests) if num_over > 0 else sum(it.num_queue_tokens + 1 for it in requests)
        if more is not None:
            own = more.num_choices if num_over > 0 else len(more.prompt) + more.num_choices
            return (load + own) * QUEUE_PARTS // more.weight
        return load * QUEUE_PARTS // lane_weights[requests[0].ask.tenant] if requests else 0

    lanes = {it.ask.tenant: [other for other in queued if other.ask.tenant == it.ask.tenant] for it in queued}
    longest = max(lanes, key=lambda tenant: (share(lanes[tenant]), tenant))
    if longest == ask.tenant:
        return refusal
    left, displaced = list(lanes[longest]), list[Request]()
    waiting = takewhile(lambda it: it.phase is Phase.WAITING, reversed(lanes[longest]))
    for request in [it for it in waiting if it.is_unserved]:
        left.remove(request)
        displaced.append(request)
        if share(left) < share(lanes.get(ask.tenant, []), ask):
            return refusal
        if len(displaced) >= num_over and sum(it.num_queue_tokens for it in displaced) >= num_tokens_over:
            return displaced
    return refusal
