"""The check of what a step writes finds each kind of wrong write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plait_testing.deepseek_v4 import V4Driver, random_ids, random_v4
from plait_testing.poison import POISON, PoisonedStep
from plait_worker.cache import KVCache
from plait_worker.models.loader import load_model
from plait_worker.parallel import Parallel

PROMPT = 40


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> V4Driver:
    path: Path = tmp_path_factory.mktemp("v4")
    random_v4("mixed").save_pretrained(path)
    return V4Driver(load_model(path, "float32", torch.device("cpu"), Parallel()))


def fill_slot(cache: KVCache, slot: int) -> None:
    cache.states[0].rings()[slot] = 1.0


def fill_page(cache: KVCache, page: int) -> None:
    cache.layers[1][page] = 1.0


def fill_snapshot(cache: KVCache, snapshot: int) -> None:
    cache.states[0].saved_rings[snapshot] = 1.0


def test_a_write_elsewhere_is_found_and_one_of_the_row_is_not(driver: V4Driver) -> None:
    driver.step({"a": random_ids(PROMPT)}, saves=[("a", 32, 1)])
    rows = driver._rows({"a": [3]}, 0, [])
    own, slot = driver.pages["a"], driver.slots["a"]
    cases: list[tuple[Callable[[KVCache, int], None], int, str | None]] = [
        (fill_page, own[PROMPT // 16], None),
        (fill_page, own[0], "page"),
        (fill_page, driver.free_pages[0], "page"),
        (fill_slot, slot, None),
        (fill_slot, driver.free_slots[0], "slot"),
        (fill_snapshot, 1, "snapshot"),
    ]
    for write, index, said in cases:
        step = PoisonedStep(driver.cache, rows)
        write(driver.cache, index)
        if said is None:
            step.check()
            continue
        with pytest.raises(AssertionError, match=f"wrote to {said} {index}"):
            step.check()


def test_what_a_step_begins_holds_poison(driver: V4Driver) -> None:
    rows = driver._rows({"new": random_ids(PROMPT)}, 1, [])
    PoisonedStep(driver.cache, rows)
    state = driver.cache.states[1]
    assert driver.cache.layers[1][driver.pages["new"]].unique().tolist() == [POISON]
    for tensor in (state.rings(), state.last, state.sums):
        assert tensor[driver.slots["new"]].unique().tolist() == [POISON]
