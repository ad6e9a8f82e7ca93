"""Runs the cases of acceptance suites side by side, each in its own process on its own cores.

`python tests/run_acceptance.py --suite cpu --out parts` keeps each case's part in `parts` with its log beside it, and
runs no case again that has one there. Then `pytest --suite cpu --full --join parts` writes the record.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from plait_testing import acceptance_parts
from plait_testing.recording import SUITES

PYTEST = (sys.executable, "-m", "pytest", "--full")


@dataclass(frozen=True, slots=True)
class Task:
    """One case, and the command that keeps it as a part."""

    suite: str
    case: str

    def command(self, out: Path, seconds: int) -> list[str]:
        return [*PYTEST, "--suite", self.suite, "--part", str(out), "--timeout", str(seconds), "-rA", self.case]


def main() -> int:
    """0 where every case passed."""
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    tasks = [task for suite in given.suite for task in missing(suite, given.paths, given.out)]
    queue: SimpleQueue[Task] = SimpleQueue()
    for task in sorted(tasks, key=lambda task: rank(task, given.first)):
        queue.put(task)
    groups = list(grouped(sorted(os.sched_getaffinity(0)), given.cores))
    print(f"{len(tasks)} cases, {len(groups)} at a time on {given.cores} cores each", flush=True)
    with ThreadPoolExecutor(len(groups)) as pool:
        failed = list(pool.map(lambda cores: run_all(queue, cores, given.out, given.timeout), groups))
    return int(any(failed))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the cases of suites side by side and keep each as a part.")
    parser.add_argument("--suite", action="append", choices=SUITES, required=True, help="may be given again")
    parser.add_argument("--out", type=Path, required=True, help="folder for parts and logs")
    parser.add_argument("--cores", type=int, default=2, help="cores that one case has (default: 2)")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds that one case may take (default: 3600)")
    parser.add_argument("--first", nargs="*", default=[], metavar="WORD", help="cases of these names first, in turn")
    parser.add_argument("paths", nargs="*", help="where to look for cases (default: everywhere, as --join does)")
    return parser.parse_args()


def missing(suite: str, paths: Sequence[str], out: Path) -> list[Task]:
    """The cases of a suite of which there is no part yet."""
    command = [*PYTEST, "--suite", suite, "--collect-only", "--quiet", *paths]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    there = {case for part in acceptance_parts.load(out, suite) for case in part.outcomes}
    return [Task(suite, case) for case in listed if "::" in case and case not in there]


def rank(task: Task, first: Sequence[str]) -> int:
    """The index of the first of these words in a case's name; after all of them if it has none."""
    return next((place for place, word in enumerate(first) if word in task.case), len(first))


def grouped(cores: Sequence[int], num_each: int) -> Iterator[Sequence[int]]:
    """As many groups of so many cores as there are; at least one."""
    for first in range(0, max(1, len(cores) - num_each + 1), num_each):
        yield cores[first : first + num_each]


def run_all(queue: SimpleQueue[Task], cores: Iterable[int], out: Path, seconds: int) -> int:
    """Take cases until there are none; the number that did not pass."""
    os.sched_setaffinity(0, cores)  # this thread's, which the processes that it starts inherit
    failed = 0
    while True:
        try:
            task = queue.get_nowait()
        except Empty:
            return failed
        failed += run(task, out, seconds) != 0


def run(task: Task, out: Path, seconds: int) -> int:
    """Pytest's exit status; what it printed is kept beside the parts."""
    begun = time.monotonic()
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{task.suite} {task.case.rpartition('::')[2]}")
    with (out / f"{name}.log").open("w") as log:
        ended = subprocess.run(task.command(out, seconds), stdout=log, stderr=subprocess.STDOUT, check=False)
    print(f"{ended.returncode} {time.monotonic() - begun:5.0f} s  {task.suite}  {task.case}", flush=True)
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
