"""A plan's buffers are written again only when the device has copied what they held."""

from __future__ import annotations

import pytest
import torch
from plait_worker.attention import plan_ring
from plait_worker.attention.plan_ring import NUM_PLANS, PlanRing

CPU = torch.device("cpu")


class Place:
    """A place in a device's work, reached when it is said to be or waited for."""

    def __init__(self, _device: torch.device) -> None:
        self.is_passed = False
        self.num_waits = 0

    def is_reached(self) -> bool:
        return self.is_passed

    def wait(self) -> None:
        self.is_passed = True
        self.num_waits += 1


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[Place]:
    """Those behind each plan's copy, in turn."""
    made: list[Place] = []

    def make(device: torch.device) -> Place:
        made.append(Place(device))
        return made[-1]

    monkeypatch.setattr(plan_ring, "DeviceEvent", make)
    return made


def take(ring: PlanRing[list[int]], plan: int) -> None:
    with ring.take() as buffers:
        buffers[:] = [plan]


def test_a_plan_waits_for_the_copy_of_the_one_that_had_its_buffers_and_for_no_other(places: list[Place]) -> None:
    ring = PlanRing(list[int], CPU)
    for plan in range(NUM_PLANS + 2):
        take(ring, plan)
    assert [place.num_waits for place in places] == [1, 1] + [0] * NUM_PLANS


def test_no_plan_waits_where_the_device_keeps_up(places: list[Place]) -> None:
    ring = PlanRing(list[int], CPU)
    for plan in range(3 * NUM_PLANS):
        take(ring, plan)
        places[-1].is_passed = True
    assert all(place.num_waits == 0 for place in places)


def test_as_many_plans_as_buffers_are_kept_apart() -> None:
    made: list[list[int]] = []

    def make() -> list[int]:
        made.append([])
        return made[-1]

    ring = PlanRing(make, CPU)
    for plan in range(NUM_PLANS):
        take(ring, plan)
    assert made == [[plan] for plan in range(NUM_PLANS)]
    take(ring, NUM_PLANS)
    assert made[0] == [NUM_PLANS]
