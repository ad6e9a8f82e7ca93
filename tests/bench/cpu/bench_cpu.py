"""Plait on a CPU beside its peers, each alone on the machine in its turn, all through `plait bench`.

    python tests/bench/cpu/bench_cpu.py --out FILE [--llama-server PATH] [--vllm-python PATH]
    python tests/bench/cpu/bench_cpu.py --out FILE --llama-server PATH --same-files --cases "512/64 @ 1" "512/64 @ 8"

All servers start first and stand still (SIGSTOP) but for the one whose turn it is. Ctrl-C ends them all; nothing is
written then. README.md beside this says how to get the peers and what is measured.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TypeVar

from plait_worker.machine import num_usable_cores

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.cpu.contestants import GGUF_FORMS, Contestant, add_flags, contestants, places, with_the_same_files
from bench.cpu.cpu_cases import CASES, CpuCase
from bench.cpu.cpu_report import PLAIT, encode, report
from bench.cpu.interleave import run_all, say
from bench.cpu.results_docs import RESULT, rewrite, table

Named = TypeVar("Named", CpuCase, Contestant)
INTERRUPTED = 130
LOGS = Path("target/bench-cpu/logs")


def main() -> int:
    typed = _parse()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    where = places(typed, num_usable_cores())
    servers = with_the_same_files(where) if typed.same_files else contestants(where)
    todo, chosen = _choose(typed.cases, list(CASES)), _choose(typed.servers, servers)
    is_whole = not typed.same_files and (len(todo), len(chosen)) == (len(CASES), len(servers))
    if not is_whole and typed.out.resolve() == RESULT:
        raise SystemExit(f"bench-cpu: {RESULT.name} keeps whole runs; name another file for a part with --out")
    LOGS.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        field = run_all(chosen, todo, LOGS)
    except KeyboardInterrupt:
        say("interrupted: the servers are gone, nothing is written")
        return INTERRUPTED
    made = encode(report(field, todo, shlex.join(["tests/bench/cpu/bench_cpu.py", *sys.argv[1:]])))
    typed.out.parent.mkdir(parents=True, exist_ok=True)
    typed.out.write_bytes(made)
    print(f"\n{table(made)}")
    say(f"written: {typed.out}, after {time.monotonic() - began:.0f} s")
    if typed.out.resolve() == RESULT:
        rewrite()  # whatever became of the servers: the documents say what the file says
    return 1 if any(one.state == "failed" for one in field.entries if one.contestant.name.startswith(PLAIT)) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure Plait on this machine's CPU beside its peers.")
    parser.add_argument("--out", type=Path, required=True, help="results file (JSON)")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help=f"of: {', '.join(case.name for case in CASES)}")
    parser.add_argument("--servers", nargs="+", metavar="NAME", help="of those that the tables name; all by default")
    forms = " and ".join(GGUF_FORMS)
    parser.add_argument(
        "--same-files", action="store_true", help=f"Plait and llama-server alone, each with the same files of {forms}"
    )
    add_flags(parser)
    return parser.parse_args()


def _choose(names: list[str] | None, things: list[Named]) -> list[Named]:
    """The named ones; raises `SystemExit` if a name is unknown."""
    known = [thing.name for thing in things]
    if wrong := [name for name in names or () if name not in known]:
        raise SystemExit(f"bench-cpu: there is no {wrong[0]!r}; there are: {', '.join(map(repr, known))}")
    return [thing for thing in things if names is None or thing.name in names]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
