"""The pool becomes smaller where other processes want its cores, and grows again."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MS = 1_000_000
LOOK = 20 * MS
"""The control decides after calls of this much time together."""


@pytest.fixture(scope="module")
def rule(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The header, compiled as the kernels are."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    assert compiler is not None, "the kernels are built with a C++ compiler: sudo apt install build-essential"
    library = tmp_path_factory.mktemp("threads") / "adaptive_threads.so"
    sources = ["-I", str(HERE.parent.parent / "kernels" / "csrc"), str(HERE / "adaptive_threads.cpp")]
    subprocess.run([compiler, "-std=c++20", "-shared", "-fPIC", "-O1", *sources, "-o", str(library)], check=True)
    opened = ctypes.CDLL(str(library))
    opened.threads_create.restype = ctypes.c_void_p
    return opened


@dataclass
class Pool:
    """Workers that are late and lose time as a test says, on a simulated clock."""

    rule: ctypes.CDLL
    most: int
    now: int = 10**15

    def __post_init__(self) -> None:
        self.threads = ctypes.c_void_p(self.rule.threads_create(self.most))

    def size(self) -> int:
        found: int = self.rule.threads_size(self.threads, ctypes.c_int64(self.now))
        return found

    def call(self, whole: int, late: list[int], lost: list[int]) -> int:
        """How many workers the call has, of whom the first are late and lose time as told."""
        size = self.size()
        self.now += whole
        Times = ctypes.c_int64 * size
        told = [Times(*(times + [0] * size)[:size]) for times in (late, lost)]
        self.rule.threads_report(self.threads, ctypes.c_int64(self.now), ctypes.c_int64(whole), *told, size)
        return size


@pytest.fixture
def pool(rule: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[Pool]:
    made = Pool(rule, request.param)
    yield made
    rule.threads_free(made.threads)


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_pool_shrinks_if_its_workers_lose_more_than_one_is_worth(pool: Pool) -> None:
    pool.call(LOOK, [], [LOOK // 2])
    assert pool.size() == 2
    pool.call(LOOK, [], [LOOK // 4 + 1, LOOK // 4])
    assert pool.size() == 1


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_moment_is_no_oversubscription(pool: Pool) -> None:
    pool.call(LOOK - 1, [], [LOOK])
    assert pool.size() == 2


@pytest.mark.parametrize("pool", [1, 4], indirect=True)
def test_a_pool_has_at_least_one_worker(pool: Pool) -> None:
    sizes = [pool.call(LOOK, [], [LOOK] * 4) for _ in range(100)]
    assert min(sizes) == 1


@pytest.mark.parametrize("pool", [8], indirect=True)
def test_a_pool_shrinks_as_far_as_it_is_oversubscribed(pool: Pool) -> None:
    """Other processes have four of eight cores: each worker more than four loses half of its time."""
    sizes = [pool.call(LOOK, [], [LOOK // 2] * (pool.size() - 4)) for _ in range(200)]
    assert sizes[:5] == [8, 7, 6, 5, 4]
    assert sizes[-50:].count(4) > 40


def pause_until_another_try(pool: Pool) -> int:
    """How long the pool stays smaller after an oversubscribed call; in whole milliseconds."""
    pool.call(LOOK, [], [LOOK])
    began = pool.now
    while pool.size() == 1:
        pool.now += MS
    return (pool.now - began) // MS


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_pool_tries_again_after_pauses_that_double_until_it_is_left_alone(pool: Pool) -> None:
    assert [pause_until_another_try(pool) for _ in range(6)] == [100, 200, 400, 800, 800, 800]
    pool.call(LOOK, [], [])
    assert pause_until_another_try(pool) == 100


@pytest.mark.parametrize("pool", [4], indirect=True)
def test_a_pool_left_alone_has_all_its_workers_again(pool: Pool) -> None:
    for _ in range(3):
        pool.call(LOOK, [], [LOOK])
    assert pool.size() < 4
    for _ in range(100):
        pool.call(LOOK, [], [])
    assert pool.size() == 4


@pytest.mark.parametrize("pool", [32, 64], indirect=True)
def test_workers_that_wake_up_are_not_oversubscribed(pool: Pool) -> None:
    """Each starts a while after the call, as on an idle machine, however short the calls are."""
    for _ in range(1000):
        assert pool.call(2 * MS, [MS * 9 // 10] * pool.most, []) == pool.most


@pytest.mark.parametrize("pool", [32], indirect=True)
def test_workers_that_begin_late_together_count_as_the_last_of_them(pool: Pool) -> None:
    pool.call(LOOK, [MS + LOOK // 32] * 32, [])
    assert pool.size() == 32
    pool.call(LOOK, [MS + LOOK // 32 + 1] * 32, [])
    assert pool.size() == 31
