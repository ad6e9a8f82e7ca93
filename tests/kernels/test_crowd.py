"""A team becomes smaller where other processes want its cores, and grows again (``kernels/csrc/crowd.h``)."""

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
"""The rule judges calls by this much of their time together."""


@pytest.fixture(scope="module")
def rule(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The header, compiled as the kernels are."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    assert compiler is not None, "the kernels are built with a C++ compiler: sudo apt install build-essential"
    library = tmp_path_factory.mktemp("crowd") / "crowd.so"
    sources = ["-I", str(HERE.parent.parent / "kernels" / "csrc"), str(HERE / "crowd.cpp")]
    subprocess.run([compiler, "-std=c++20", "-shared", "-fPIC", "-O1", *sources, "-o", str(library)], check=True)
    opened = ctypes.CDLL(str(library))
    opened.crowd_create.restype = ctypes.c_void_p
    return opened


@dataclass
class Team:
    """Members that call and lose as a test says, on a clock of their own."""

    rule: ctypes.CDLL
    most: int
    now: int = 10**15

    def __post_init__(self) -> None:
        self.crowd = ctypes.c_void_p(self.rule.crowd_create(self.most))

    def size(self) -> int:
        found: int = self.rule.crowd_size(self.crowd, ctypes.c_int64(self.now))
        return found

    def call(self, whole: int, late: list[int], lost: list[int]) -> int:
        """How many members the call has, of whom the first are late and lose time as told."""
        size = self.size()
        self.now += whole
        Times = ctypes.c_int64 * size
        told = [Times(*(times + [0] * size)[:size]) for times in (late, lost)]
        self.rule.crowd_tell(self.crowd, ctypes.c_int64(self.now), ctypes.c_int64(whole), *told, size)
        return size


@pytest.fixture
def team(rule: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[Team]:
    made = Team(rule, request.param)
    yield made
    rule.crowd_free(made.crowd)


@pytest.mark.parametrize("team", [2], indirect=True)
def test_a_team_shrinks_where_its_members_lose_more_than_one_is_worth(team: Team) -> None:
    team.call(LOOK, [], [LOOK // 2])
    assert team.size() == 2
    team.call(LOOK, [], [LOOK // 4 + 1, LOOK // 4])
    assert team.size() == 1


@pytest.mark.parametrize("team", [2], indirect=True)
def test_a_moment_is_no_crowd(team: Team) -> None:
    team.call(LOOK - 1, [], [LOOK])
    assert team.size() == 2


@pytest.mark.parametrize("team", [1, 4], indirect=True)
def test_a_team_has_at_least_one_member(team: Team) -> None:
    sizes = [team.call(LOOK, [], [LOOK] * 4) for _ in range(100)]
    assert min(sizes) == 1


@pytest.mark.parametrize("team", [8], indirect=True)
def test_a_team_shrinks_as_far_as_it_is_crowded(team: Team) -> None:
    """Four of eight cores are others': each member more than four loses half of its time."""
    sizes = [team.call(LOOK, [], [LOOK // 2] * (team.size() - 4)) for _ in range(200)]
    assert sizes[:5] == [8, 7, 6, 5, 4]
    assert sizes[-50:].count(4) > 40


def pause_until_another_try(team: Team) -> int:
    """How long the team stays smaller after a crowded look; in whole milliseconds."""
    team.call(LOOK, [], [LOOK])
    began = team.now
    while team.size() == 1:
        team.now += MS
    return (team.now - began) // MS


@pytest.mark.parametrize("team", [2], indirect=True)
def test_a_team_tries_again_after_pauses_that_double_until_it_is_left_alone(team: Team) -> None:
    assert [pause_until_another_try(team) for _ in range(6)] == [100, 200, 400, 800, 800, 800]
    team.call(LOOK, [], [])
    assert pause_until_another_try(team) == 100


@pytest.mark.parametrize("team", [4], indirect=True)
def test_a_team_left_alone_is_whole_again(team: Team) -> None:
    for _ in range(3):
        team.call(LOOK, [], [LOOK])
    assert team.size() < 4
    for _ in range(100):
        team.call(LOOK, [], [])
    assert team.size() == 4


@pytest.mark.parametrize("team", [32, 64], indirect=True)
def test_members_that_wake_up_are_not_crowded(team: Team) -> None:
    """Each begins a while after the call, as on an idle machine, however short the calls are."""
    for _ in range(1000):
        assert team.call(2 * MS, [MS * 9 // 10] * team.most, []) == team.most


@pytest.mark.parametrize("team", [32], indirect=True)
def test_members_that_begin_late_together_count_as_the_last_of_them(team: Team) -> None:
    team.call(LOOK, [MS + LOOK // 32] * 32, [])
    assert team.size() == 32
    team.call(LOOK, [MS + LOOK // 32 + 1] * 32, [])
    assert team.size() == 31
