"""A rank keeps, saves and restores the state of its slots as plans say, and counts it before pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plait_proto import ExitCode, SlotState
from plait_testing.attention_cases import cpu_attention
from plait_testing.deepseek_v4 import CSA, HCA, random_ids, random_v4
from plait_testing.stepper import Stepper
from plait_testing.tiny_models import config_for
from plait_worker.cache import KVCache, bytes_per_page
from plait_worker.capacity import MemoryBudget
from plait_worker.errors import WorkerError
from plait_worker.models.loader import load_model
from plait_worker.models.model import Model
from plait_worker.parallel import Parallel
from plait_worker.pools import StateBytes, check_cache, choose_pools, state_bytes
from plait_worker.rank import Rank
from plait_worker.slot_state import StateSizes
from plait_worker.slots import Slots

CPU = torch.device("cpu")
PAGE, NUM_PAGES, NUM_SLOTS = 16, 64, 4
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("v4")
    random_v4("mixed").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Model[Any]:
    return load_model(folder, "float32", CPU, Parallel())


@pytest.fixture
def stepper(model: Model[Any]) -> Stepper:
    rank = Rank(
        model=model,
        cache=KVCache(model.cache_specs, NUM_PAGES, PAGE, CPU, StateSizes(NUM_SLOTS, 256, 2)),
        attention=cpu_attention(model.attention_specs, PAGE, PAGE, 256),
        slots=Slots(NUM_SLOTS, NUM_PAGES, PAGE, 512, CPU),
        parallel=Parallel(),
    )
    return Stepper(rank.step, PAGE, NUM_PAGES)


def test_a_restored_request_gives_the_tokens_of_a_cold_one(stepper: Stepper) -> None:
    shared, rest = random_ids(64, 1), random_ids(21, 2)
    cold = stepper.admit(shared + rest)
    stepper.save(cold, 48, 1)
    expected = list(stepper.generate(cold, 12, chunk=57))
    warm = stepper.admit(shared + rest)
    stepper.adopt(warm, cold, 48)
    stepper.restore(warm, 1)
    assert stepper.generate(warm, 12, chunk=5) == expected


def test_a_state_saved_while_decoding_is_restored(stepper: Stepper) -> None:
    first = stepper.admit(random_ids(40, 1))
    output = list(stepper.generate(first, 8, chunk=40))
    stepper.save(first, 48, 0)
    output = list(stepper.generate(first, 20, chunk=1))
    second = stepper.admit(random_ids(40, 1) + output[:10])
    stepper.adopt(second, first, 48)
    stepper.restore(second, 0)
    assert stepper.generate(second, 10, chunk=2) == output[10:]


def _save_elsewhere(stepper: Stepper, slot: int) -> None:
    stepper.save(slot, 32, 0)
    stepper.step({slot: 20})


def _save_unknown(stepper: Stepper, slot: int) -> None:
    stepper.save(slot, 16, 2)
    stepper.step({slot: 20})


def _save_idle(stepper: Stepper, slot: int) -> None:
    stepper.save(slot + 1, 16, 0)
    stepper.step({slot: 20})


def _restore_unknown(stepper: Stepper, slot: int) -> None:
    stepper.restore(slot, 2)
    stepper.step({slot: 20})


def _restore_running(stepper: Stepper, slot: int) -> None:
    stepper.step({slot: 20})
    stepper.restore(slot, 0)
    stepper.step({slot: 20})


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_save_elsewhere, "before position 32, and its row computes 20 tokens from 0"),
        (_save_unknown, "names a snapshot, and there are 2"),
        (_save_idle, "which has no row"),
        (_restore_unknown, "names a snapshot, and there are 2"),
        (_restore_running, "restores a slot that is not new"),
    ],
)
def test_a_plan_that_contradicts_the_slots_is_a_fault(
    fault: Callable[[Stepper, int], None], said: str, stepper: Stepper
) -> None:
    slot = stepper.admit(random_ids(50, 1))
    with pytest.raises(WorkerError, match=said):
        fault(stepper, slot)


def test_a_page_that_cuts_entries_is_refused_with_one_that_does_not(model: Model[Any], tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"must be a multiple of 16, .* set --page-size 256") as caught:
        check_cache(config_for(tmp_path, tmp_path, page_size=8), model, "cpu")
    assert caught.value.code == ExitCode.SETTINGS
    check_cache(config_for(tmp_path, tmp_path, page_size=16), model, "cpu")


def test_ratios_of_which_no_page_holds_whole_entries_are_refused(tmp_path: Path) -> None:
    random_v4("mixed", compress_rates={CSA: 4, HCA: 12}).save_pretrained(tmp_path)
    odd = load_model(tmp_path, "float32", CPU, Parallel())
    with pytest.raises(WorkerError, match=r"must be a multiple of 12, .* no power of two is one"):
        check_cache(config_for(tmp_path, tmp_path, page_size=256), odd, "cpu")


def test_a_gpu_is_refused(model: Model[Any], tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="no GPU kernels in this version; set --device cpu"):
        check_cache(config_for(tmp_path, tmp_path, page_size=16), model, "cuda")


STATE = StateBytes(slot=MIB, snapshot=MIB // 2, reserved=20 * MIB)


def test_slots_are_counted_before_pages_and_snapshots_take_an_eighth_of_pages(tmp_path: Path) -> None:
    config = config_for(tmp_path, tmp_path, max_model_len=64)
    budget = MemoryBudget(200 * MIB, 0, 10 * MIB)
    pools = choose_pools(config, MIB, STATE, 110 * MIB, budget)
    assert pools.num_pages == 80
    assert pools.slot_state == SlotState(slot_bytes=MIB, snapshot_bytes=MIB // 2, num_snapshots=20)


def test_slots_that_do_not_fit_are_refused_with_the_bytes_of_one(tmp_path: Path) -> None:
    config = config_for(tmp_path, tmp_path, max_model_len=64, num_pages=4)
    with pytest.raises(WorkerError, match=r"20\.0 MiB for the state of its slots, 1\.0 MiB a slot, and 9\.0 MiB"):
        choose_pools(config, MIB, STATE, 5 * MIB, MemoryBudget(9 * MIB, 0, 0))


def test_slots_that_leave_no_share_for_pages_are_refused_with_the_bytes_of_one(tmp_path: Path) -> None:
    config = config_for(tmp_path, tmp_path, max_model_len=64)
    with pytest.raises(WorkerError, match=r"1\.0 MiB a slot, and 19\.0 MiB of memory are there .* --memory-fraction"):
        choose_pools(config, MIB, STATE, 19 * MIB, MemoryBudget(400 * MIB, 0, 0))


def test_pages_too_few_for_a_snapshot_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_for(tmp_path, tmp_path, max_model_len=48, num_pages=3)
    pools = choose_pools(config, MIB, STATE, 100 * MIB, MemoryBudget(100 * MIB, 0, 0))
    assert pools.slot_state is not None
    assert pools.slot_state.num_snapshots == 0
    assert "the prefix cache finds nothing; set --num-snapshots" in caplog.text


def test_fewer_pages_asked_for_than_one_request_takes_are_refused(tmp_path: Path) -> None:
    config = config_for(tmp_path, tmp_path, max_model_len=100, page_size=32, num_pages=3)
    said = (
        "--num-pages 3 is less than one request of --max-model-len 100 takes, 4 pages of 32 tokens; set --num-pages 4"
    )
    with pytest.raises(WorkerError, match=said) as caught:
        choose_pools(config, MIB, STATE, 100 * MIB, MemoryBudget(100 * MIB, 0, 0))
    assert caught.value.code == ExitCode.SETTINGS


def test_pages_for_less_than_one_request_are_refused(tmp_path: Path) -> None:
    config = config_for(tmp_path, tmp_path, max_model_len=4096)
    with pytest.raises(WorkerError, match="one request of 4096 tokens needs"):
        choose_pools(config, MIB, STATE, 30 * MIB, MemoryBudget(40 * MIB, 0, 0))


def test_pages_that_hold_nothing_are_as_many_as_the_slots_can_fill(tmp_path: Path) -> None:
    """Of a model of dense layers alone; an eighth of what pages would take goes to snapshots, one a page at most."""
    config = config_for(tmp_path, tmp_path, max_model_len=100, max_seqs=3, page_size=32)
    budget = MemoryBudget(200 * MIB, 0, 10 * MIB)
    pools = choose_pools(config, 0, STATE, 38 * MIB, budget)
    assert (pools.num_pages, pools.slot_state) == (12, SlotState(MIB, MIB // 2, 4))
    pools = choose_pools(config, 0, STATE, 110 * MIB, budget)
    assert (pools.num_pages, pools.slot_state) == (12, SlotState(MIB, MIB // 2, 12))


def test_a_model_without_slot_state_offers_pages_alone(tmp_path: Path) -> None:
    config = config_for(tmp_path, tmp_path, max_model_len=64)
    pools = choose_pools(config, MIB, StateBytes(), 64 * MIB, MemoryBudget(90 * MIB, 0, 0))
    assert (pools.num_pages, pools.slot_state) == (64, None)


def test_what_is_said_of_the_state_is_what_is_allocated(model: Model[Any], tmp_path: Path) -> None:
    config = config_for(tmp_path, tmp_path, max_batch_tokens=100, max_seqs=4)
    counted = state_bytes(config, model)
    cache = KVCache(model.cache_specs, 8, PAGE, CPU, StateSizes(4, 104, 3))
    of_slots = sum(each.nbytes for state in cache.states for each in (state.raw, state.sums, state.last))
    of_snapshots = sum(each.nbytes for state in cache.states for each in (state.saved_rings, state.saved_last))
    assert of_slots == counted.reserved
    assert of_snapshots == 3 * counted.snapshot
    assert sum(pages.nbytes for pages in (*cache.layers, *cache.index_keys)) == 9 * bytes_per_page(
        model.cache_specs, PAGE
    )
