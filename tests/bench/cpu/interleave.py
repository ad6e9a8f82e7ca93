"""The order of measurements: for each case, one server after the other, each alone on the machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from bench.cpu.contestants import Contestant
from bench.cpu.cpu_cases import CpuCase
from bench.cpu.server_process import ServerFailed, ServerProcess, start
from plait.bench.cases import cases
from plait.bench.compare import value
from plait.bench.measure import Bench, Measured
from plait.errors import StartError
from plait_testing.held_port import held_port


@dataclass(frozen=True)
class CaseRun:
    """One case on one server, once."""

    case: str
    server: str
    repeat: int
    measured: Measured
    peak_bytes: int
    foreign_cores: float
    """The load of other processes, in cores; our busy process does not count."""


@dataclass
class Entry:
    """A contestant with its process, or the reason why it has none."""

    contestant: Contestant
    process: ServerProcess | None = None
    state: str = "not started"
    """`ran`, `missing` or `failed`."""
    reason: str = ""
    log: Path | None = None

    @property
    def computes(self) -> str:
        """Its number formats: known beforehand, or as Plait prints them."""
        return self.contestant.computes or (model_line(self.log) if self.log is not None else "")

    def fail(self, reason: str) -> None:
        """It is not measured any more."""
        self.state, self.reason = "failed", reason
        say(f"{self.contestant.name}: FAILED: {reason}")
        if self.process is not None:
            self.process.stop()
            self.process = None


@dataclass
class Field:
    """All contestants, of which one runs at a time."""

    entries: list[Entry] = field(default_factory=list)
    runs: list[CaseRun] = field(default_factory=list)


def say(line: str) -> None:
    print(f"bench-cpu: {line}", flush=True)


def run_all(contestants: list[Contestant], todo: list[CpuCase], logs: Path) -> Field:
    """Every case on every server; no process is left running, however it ends."""
    field = Field()
    try:
        for contestant in contestants:
            field.entries.append(_start(contestant, logs))
        for case in todo:
            for repeat in range(case.repeats):
                _round(field, case, repeat)
    finally:
        for entry in field.entries:
            if entry.process is not None:
                entry.process.stop()
    return field


def _start(contestant: Contestant, logs: Path) -> Entry:
    """Start a server, and pause it once it is ready."""
    entry = Entry(contestant)
    if contestant.missing is not None:
        entry.state, entry.reason = "missing", contestant.missing
        say(f"{contestant.name}: MISSING: {contestant.missing}")
        return entry
    with held_port() as port:
        return _start_at(port, entry, logs / f"{contestant.name.replace(' ', '')}.log")


def _start_at(port: int, entry: Entry, log: Path) -> Entry:
    contestant, began = entry.contestant, time.monotonic()
    command = [word.replace("{port}", str(port)) for word in contestant.command]
    process = start(contestant.name, command, port, contestant.environment, log)
    try:
        process.wait_until_ready(contestant.ready)
    except ServerFailed as failed:
        entry.process = process
        entry.fail(f"{failed} (its lines: {log})")
    except BaseException:
        process.stop()
        raise
    else:
        process.pause()
        entry.process, entry.state, entry.log = process, "ran", log
        say(f"{contestant.name}: ready after {time.monotonic() - began:.0f} s")
    return entry


def model_line(log: Path) -> str:
    """What Plait's first lines say of the model: its type and device."""
    lines = (line.strip() for line in log.read_text().splitlines())
    return next((line.removeprefix("model").strip() for line in lines if line.startswith("model ")), "")


def _round(field: Field, case: CpuCase, repeat: int) -> None:
    """Each server once; who goes first alternates."""
    entries = field.entries if repeat % 2 == 0 else list(reversed(field.entries))
    for entry in entries:
        if entry.process is None or case.kind not in entry.contestant.takes:
            continue
        try:
            case_run = _run_case(entry.process, case, repeat)
        except (ServerFailed, StartError, psutil.Error, OSError) as failed:
            entry.fail(f"in {case.name}: {failed}; its last line: {entry.process.last_line}")
            continue
        field.runs.append(case_run)
        say(_words(case_run))
        if case_run.measured.run.is_partial:
            raise KeyboardInterrupt


def _run_case(process: ServerProcess, case: CpuCase, repeat: int) -> CaseRun:
    with _awake(process), _busy_process(case.is_beside_busy) as busy:

        def known_seconds() -> float:
            return _own_seconds() + process.cpu_seconds() + _seconds_of(busy)

        process.reset_peak()
        clock, ours = _busy_seconds(), known_seconds()
        began = time.monotonic()
        measured = _measure(process, case, repeat)
        seconds = time.monotonic() - began
        foreign = _busy_seconds() - clock - (known_seconds() - ours)
        process.require_alive()
        if not measured.metrics.num_completed and not measured.run.is_partial:
            raise ServerFailed(f"no request was completed: {measured.metrics.failures}")
        return CaseRun(case.name, process.name, repeat, measured, process.peak_bytes(), max(0.0, foreign / seconds))


def _measure(process: ServerProcess, case: CpuCase, repeat: int) -> Measured:
    """Warm-up requests and the load, through `plait bench`; prompts are new each time."""
    (load,) = cases(case.settings)
    bench = Bench(case.settings, [process.url])
    return bench.measure(load, bench.servers[0], repeat)


@contextlib.contextmanager
def _awake(process: ServerProcess) -> Iterator[None]:
    process.resume()
    try:
        yield
    finally:
        process.pause()


@contextlib.contextmanager
def _busy_process(is_wanted: bool) -> Iterator[psutil.Process | None]:
    """A loop that takes a core, in its own session, as a compiler in another terminal; None if not asked for."""
    if not is_wanted:
        yield None
        return
    busy = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"], start_new_session=True)
    try:
        yield psutil.Process(busy.pid)
    finally:
        busy.kill()
        busy.wait()


def _seconds_of(busy: psutil.Process | None) -> float:
    """Processor time of the busy process."""
    if busy is None:
        return 0.0
    times = busy.cpu_times()
    return float(times.user + times.system)


def _busy_seconds() -> float:
    """Processor time of the whole machine."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice + times.irq + times.softirq)


def _own_seconds() -> float:
    """Of this process and of its children that ended and were waited for: the clients."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _words(case_run: CaseRun) -> str:
    def ms(metric: str) -> str:
        found = value(case_run.measured, metric)
        return "-" if found is None else f"{found * 1000:.0f}"

    late = (
        f"; INVALID: {'; '.join(case_run.measured.client_lag.reasons)}" if case_run.measured.client_lag.reasons else ""
    )
    failed = sum(case_run.measured.metrics.failures.values())
    return (
        f"{case_run.case}, {case_run.server}, run {case_run.repeat + 1}: "
        f"{case_run.measured.metrics.output_tokens_per_second:.1f} tokens/s, TTFT p50 {ms('ttft_p50')} ms, ITL "
        f"p50/p99/max {ms('itl_p50')}/{ms('itl_p99')}/{ms('itl_max')} ms, {case_run.peak_bytes / 1e6:.0f} MB"
        f"{f', {failed} FAILED' if failed else ''}{late}"
    )
