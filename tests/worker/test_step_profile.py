"""A rank's profiler, and the orders that it finds in the run directory."""

from __future__ import annotations

import gzip
import json
import threading
import time
from pathlib import Path

import pytest
import torch
from plait_proto import ProfileOrder, RankProfile
from plait_proto.profiles import NUMBER, ORDER, create_number, read_rank_profile, write_order
from plait_testing.tiny_models import config_for
from plait_worker.step_profile import StepProfiler, open_profiler
from torch import Tensor

RANK = 3


class Orders:
    """The engine's side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0
        create_number(folder)

    def give(self, name: str, first_step: int, num_steps: int) -> None:
        self._number += 1
        steps = (0, first_step)
        folder = str(self.folder)
        write_order(
            self.folder,
            ProfileOrder(number=self._number, name=name, folder=folder, first_steps=steps, num_steps=num_steps),
        )

    def end(self) -> None:
        self.give("", 0, 0)

    def said(self) -> RankProfile | None:
        return read_rank_profile(self.folder, RANK)

    def wait_for_trace(self) -> RankProfile:
        deadline = time.monotonic() + 60
        while (said := self.said()) is None or said.state == "running":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return said

    def num_matmuls(self, trace: RankProfile) -> int:
        with gzip.open(self.folder / trace.file) as file:
            return sum(event["name"] == "aten::mm" for event in json.load(file)["traceEvents"])


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    return Orders(tmp_path)


@pytest.fixture
def profiler(orders: Orders) -> StepProfiler:
    return StepProfiler(orders.folder, RANK, replica=1)


def compute(profiler: StepProfiler, *steps: int) -> None:
    for step in steps:
        profiler.before_step(step)
        torch.mm(ones(), ones())
        profiler.after_step(step)


def ones() -> Tensor:
    return torch.ones(2, 2)


def test_it_profiles_the_ordered_steps_of_its_replica(orders: Orders, profiler: StepProfiler) -> None:
    compute(profiler, 1, 2)
    orders.give("a", first_step=4, num_steps=3)
    compute(profiler, 3)
    assert orders.said() is None
    compute(profiler, 4)
    assert orders.said() == RankProfile(name="a", state="running")
    compute(profiler, 5, 6, 7, 8)
    trace = orders.wait_for_trace()
    assert trace == RankProfile(
        name="a", state="written", file=f"a-rank-{RANK}.json.gz", first_step=4, num_steps=3, reason=""
    )
    assert orders.num_matmuls(trace) == 3


def test_it_counts_the_steps_that_come_where_numbers_are_left_out(orders: Orders, profiler: StepProfiler) -> None:
    compute(profiler, 1)
    orders.give("a", first_step=2, num_steps=2)
    compute(profiler, 4, 7, 8)
    trace = orders.wait_for_trace()
    assert (trace.first_step, trace.num_steps, orders.num_matmuls(trace)) == (4, 2, 2)


def test_it_stops_after_the_same_step_though_it_began_late(orders: Orders, profiler: StepProfiler) -> None:
    compute(profiler, 1, 2, 3)
    orders.give("a", first_step=2, num_steps=4)
    compute(profiler, 4)
    profiler.before_step(5)
    profiler.after_step(4)
    assert orders.said() == RankProfile(name="a", state="running"), "step 5 is on the device"
    profiler.before_step(6)
    trace = orders.wait_for_trace()
    assert (trace.first_step, trace.num_steps) == (4, 2)


def test_a_profile_whose_steps_are_over_begins_a_few_steps_later(orders: Orders, profiler: StepProfiler) -> None:
    compute(profiler, *range(1, 20))
    orders.give("a", first_step=2, num_steps=3)
    compute(profiler, *range(20, 40))
    trace = orders.wait_for_trace()
    assert (trace.first_step, trace.num_steps) == (34, 3)


def test_an_order_that_ends_has_the_steps_that_came_without_another(orders: Orders, profiler: StepProfiler) -> None:
    orders.give("a", first_step=1, num_steps=9)
    compute(profiler, 1, 2)
    assert profiler.look()
    orders.end()
    assert not profiler.look()
    assert orders.wait_for_trace().num_steps == 2
    compute(profiler, 3)
    assert not profiler.look()


def test_the_next_order_begins_anew(orders: Orders, profiler: StepProfiler) -> None:
    for name, first in (("a", 1), ("b", 3)):
        orders.give(name, first, num_steps=1)
        compute(profiler, first, first + 1)
        trace = orders.wait_for_trace()
        assert (trace.name, orders.num_matmuls(trace)) == (name, 1)


def test_an_order_that_is_there_before_its_number_is_taken_once(orders: Orders, profiler: StepProfiler) -> None:
    orders.give("a", first_step=1, num_steps=3)
    number = (orders.folder / NUMBER).read_bytes()
    orders.give("b", first_step=1, num_steps=3)
    newer = (orders.folder / NUMBER).read_bytes()
    with (orders.folder / NUMBER).open("r+b") as file:
        file.write(number)
    compute(profiler, 1)
    with (orders.folder / NUMBER).open("r+b") as file:
        file.write(newer)
    compute(profiler, 2, 3)
    trace = orders.wait_for_trace()
    assert (trace.name, trace.first_step, trace.num_steps) == ("b", 1, 3)


def test_an_order_that_cannot_be_read_ends_no_step(orders: Orders, profiler: StepProfiler) -> None:
    orders.give("a", first_step=1, num_steps=1)
    (orders.folder / ORDER).write_bytes(b"{")
    compute(profiler, 1)
    orders.give("b", first_step=2, num_steps=1)
    compute(profiler, 2)
    assert orders.wait_for_trace().name == "b"


def test_a_trace_that_cannot_be_written_is_told_and_leaves_nothing(
    orders: Orders, profiler: StepProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", no_space)
    orders.give("a", first_step=1, num_steps=1)
    before = {file.name for file in orders.folder.iterdir()}
    compute(profiler, 1)
    assert orders.wait_for_trace().reason == "OSError: [Errno 28] No space left on device"
    assert {file.name for file in orders.folder.iterdir()} == {*before, f"profile-rank-{RANK}"}


def test_a_disk_that_hangs_holds_no_step(
    orders: Orders, profiler: StepProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr("shutil.copyfileobj", lambda *_: hangs.wait())
    orders.give("a", first_step=1, num_steps=1)
    compute(profiler, 1)
    orders.give("b", first_step=2, num_steps=1)
    compute(profiler, 2)
    assert "still writes the trace before" in orders.wait_for_trace().reason
    hangs.set()


def test_a_profiler_that_does_not_start_ends_no_step(
    orders: Orders, profiler: StepProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.profiler.profile.start", lambda _: 1 / 0)
    orders.give("a", first_step=1, num_steps=2)
    compute(profiler, 1, 2)
    said = orders.said()
    assert said is not None
    assert (said.state, said.reason) == ("failed", "ZeroDivisionError: division by zero")


def test_a_rank_that_starts_later_takes_no_earlier_order(orders: Orders) -> None:
    orders.give("a", first_step=1, num_steps=2)
    compute(StepProfiler(orders.folder, RANK, replica=1), 1, 2, 3)
    assert orders.said() is None


def test_a_server_without_orders_has_no_profiler(tmp_path: Path) -> None:
    config = config_for(tmp_path, tmp_path)
    assert open_profiler(config, 0) is None
    create_number(tmp_path)
    assert isinstance(open_profiler(config, 0), StepProfiler)
