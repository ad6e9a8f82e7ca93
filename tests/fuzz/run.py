"""Fuzz every decoder: `make fuzz SECONDS=600`, or `python -m fuzz.run --inputs 1000000 frames` in tests.

The decoders of the crates run in a process of their own (`router/fuzz`), those of the Python packages in another. A
process that does not survive an input, or computes for over 20 s on one, is a failure too. What failed lies in
target/fuzz: mend the decoder, and move the input into tests/fuzz/corpus, which every run decodes first.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fuzz.mutate import make_input
from fuzz.targets import ROOT, TARGETS, Target, named

FAILURES = ROOT / "target/fuzz"
MAX_CPU_SECONDS = 20.0
"""Of one input. Computing, not waiting: a busy machine is no hang."""
MAX_GROWN_BYTES = 1 << 30
"""Of the process, over all inputs of a target."""
Found = dict[str, Any]


@contextmanager
def _limited() -> Iterator[None]:
    """Raises `HungError` in time, and ends the process where C code computes, which no exception reaches."""
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, 4 * MAX_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


class HungError(Exception):
    """An input took too long."""


def _hang(*_: object) -> None:
    raise HungError(f"it computed for {MAX_CPU_SECONDS:g} s")


def run_python(target: Target, seed: int, goes_on: Callable[[int], bool]) -> Found:
    """Decode the corpus, then spoilt inputs while `goes_on`; what was found."""
    corpus, at_first = target.corpus(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert corpus, f"{target.name} has a corpus"
    failures: list[tuple[int, str]] = []
    number = num_taken = 0
    slowest = 0.0
    signal.signal(signal.SIGVTALRM, _hang)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    FAILURES.mkdir(parents=True, exist_ok=True)
    at = FAILURES / f"{target.name}.at"
    while number < len(corpus) or goes_on(number - len(corpus)):
        raw = make_input(target.name, seed, number, corpus, target.words)
        begin = time.thread_time()
        at.write_bytes(number.to_bytes(8, "little"))
        try:
            with _limited():
                target.decode(raw)
            num_taken += 1
        except target.refusals:
            pass
        except Exception as error:  # noqa: BLE001 (whatever it is, it is what is looked for)
            failures.append((number, f"{type(error).__name__}: {error}"[:300]))
            _keep(target.name, seed, number, raw)
        slowest = max(slowest, time.thread_time() - begin)
        number += 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - at_first) << 10
    if grown > MAX_GROWN_BYTES:
        failures.append((number, f"the process grew by {grown} bytes; {MAX_GROWN_BYTES} are allowed"))
    return {
        "target": target.name,
        "inputs": number,
        "taken": num_taken,
        "peak_bytes": grown,
        "slowest_cpu_ms": round(slowest * 1000),
        "failures": failures,
    }


def _keep(name: str, seed: int, number: int, raw: bytes) -> None:
    (FAILURES / f"{name}-{seed}-{number}").write_bytes(raw)


def _until(unit: str, amount: int) -> Callable[[int], bool]:
    if unit == "inputs":
        return lambda number: number < amount
    end = time.monotonic() + amount
    return lambda _: time.monotonic() < end


def _run_here(name: str, seed: int, unit: str, amount: int) -> Found:
    """A target of Python, in a process of its own."""
    words = [sys.executable, "-m", "fuzz.run", "--here", name, "--seed", str(seed), f"--{unit}", str(amount)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        target, number = named(name), int.from_bytes((FAILURES / f"{name}.at").read_bytes(), "little")
        _keep(name, seed, number, make_input(name, seed, number, target.corpus(), target.words))
        return {"target": name, "failures": [(number, f"the process ended with {done.returncode}")]}
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def _run_crate(binary: Path, name: str, seed: int, unit: str, amount: int) -> Found:
    """A target of the crates."""
    words = [str(binary), "run", name, str(seed), unit, str(amount), str(FAILURES)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.stdout:
        found: Found = json.loads(done.stdout)
        return found
    number = int.from_bytes((FAILURES / f"{name}.at").read_bytes(), "little")
    subprocess.run([str(binary), "keep", name, str(seed), str(number), str(FAILURES)], check=True, capture_output=True)
    return {"target": name, "failures": [(number, f"the process ended with {done.returncode}: {done.stderr[-300:]}")]}


def _build() -> Path:
    words = [
        sys.executable,
        str(ROOT / "tools/cargo.py"),
        "build",
        "--locked",
        "--quiet",
        "--release",
        "-p",
        "plait-fuzz",
    ]
    subprocess.run(words, check=True, cwd=ROOT)
    return ROOT / "target/release/plait-fuzz"


def main(argv: list[str]) -> int:
    """Run the targets; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="TARGET", help="all by default")
    parser.add_argument("--seconds", type=int, help="for all targets together")
    parser.add_argument("--inputs", type=int, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--binary", type=Path, help="plait-fuzz, if it is built")
    parser.add_argument("--out", type=Path, help="file for the record")
    parser.add_argument("--here", metavar="TARGET", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    unit, amount = ("inputs", args.inputs) if args.inputs is not None else ("seconds", args.seconds or 60)
    if args.here is not None:
        print(json.dumps(run_python(named(args.here), args.seed, _until(unit, amount))))
        return 0
    binary = args.binary or _build()
    crates = subprocess.run([str(binary), "list"], check=True, capture_output=True, text=True).stdout.split()
    chosen = [(name, True) for name in crates] + [(target.name, False) for target in TARGETS]
    chosen = [each for each in chosen if not args.names or each[0] in args.names]
    share = max(1, amount // len(chosen)) if unit == "seconds" else amount
    found = []
    for name, is_crates in chosen:
        one = _run_crate(binary, name, args.seed, unit, share) if is_crates else _run_here(name, args.seed, unit, share)
        one["language"] = "Rust" if is_crates else "Python"
        found.append(one)
        _say(one)
    if args.out is not None:
        record = {"command": " ".join(["make fuzz", f"{unit.upper()}={amount}"]), "seed": args.seed, "targets": found}
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if any(one["failures"] for one in found) else 0


def _say(found: Found) -> None:
    num, taken, failures = found.get("inputs", 0), found.get("taken", 0), found["failures"]
    memory, slowest = found.get("peak_bytes", 0) >> 20, found.get("slowest_cpu_ms", 0)
    print(
        f"{found['language']:6} {found['target']:18} {num:10,} inputs, {taken:9,} taken, {memory:5} MiB, "
        f"slowest {slowest:6} ms of CPU, {len(failures)} failures",
        flush=True,
    )
    for number, why in failures[:5]:
        print(f"       input {number}: {why}; kept in {FAILURES}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
