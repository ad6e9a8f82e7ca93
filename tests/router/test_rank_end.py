"""What a rank's end means, by its exit code and its last lines."""

from __future__ import annotations

import signal

import pytest
from plait.launch.rank_end import LastLines, exit_code_of, reason_of
from plait_proto import ExitCode


def said(*lines: str) -> LastLines:
    found = LastLines()
    for line in lines:
        found.add(line)
    return found


BAD_ALLOC = said("terminate called after throwing an instance of 'std::bad_alloc'", "  what():  std::bad_alloc", "")
LOADER = said("python: error while loading shared libraries: libx.so: failed to map segment from shared object")


@pytest.mark.parametrize(
    ("code", "lines", "expected"),
    [
        (0, BAD_ALLOC, 0),
        (ExitCode.MODEL_FILES, BAD_ALLOC, ExitCode.MODEL_FILES),
        (-signal.SIGABRT, BAD_ALLOC, ExitCode.HARDWARE),
        (-signal.SIGABRT, said("zmq: Assertion failed"), -signal.SIGABRT),
        (-signal.SIGKILL, BAD_ALLOC, -signal.SIGKILL),
        (127, LOADER, ExitCode.HARDWARE),
        (127, said("python: symbol lookup error"), ExitCode.RANK_LOST),
        (5, said(), 5),
    ],
)
def test_a_rank_whose_library_found_no_memory_ended_for_its_hardware(
    code: int, lines: LastLines, expected: int
) -> None:
    assert exit_code_of(code, lines) == expected


def test_the_reason_is_what_it_said_of_memory_or_how_it_ended() -> None:
    assert reason_of(-signal.SIGABRT, BAD_ALLOC) == "is out of memory: what():  std::bad_alloc"
    assert reason_of(-signal.SIGKILL, BAD_ALLOC) == "was killed by SIGKILL"
    assert reason_of(127, said()) == "ended with exit code 127"
    assert reason_of(3, BAD_ALLOC) == "ended with exit code 3"
