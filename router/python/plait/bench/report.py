"""The end of a command: comparison, notes, files and exit code."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeAlias

import msgspec
from plait_proto import ExitCode

from plait.bench.compare import ratios, spread_table
from plait.bench.measure import Bench, Measured
from plait.bench.plots import draw, require_matplotlib
from plait.bench.result_file import record
from plait.bench.settings import BenchSettings
from plait.bench.table import foot, table
from plait.errors import DONE, SettingsError, StartError
from plait.output import discard_output

Stop: TypeAlias = StartError | KeyboardInterrupt | BrokenPipeError


class Written(msgspec.Struct, frozen=True):
    """Where results are written, and their name."""

    folder: Path | None
    command: str
    name: str
    stop: Stop | None
    """What stopped the command before all runs were measured."""


def until_stopped(measure_all: Callable[[], object], runs: list[Measured]) -> Stop | None:
    """Measure; returns what stopped it, and raises that if `runs` holds no finished run."""
    try:
        measure_all()
    except (StartError, KeyboardInterrupt, BrokenPipeError) as stop:
        if not runs:
            raise
        if isinstance(stop, BrokenPipeError):  # the tables' reader is gone; the files are still written
            discard_output()
        return stop
    return None


def out_folder(settings: BenchSettings) -> Path | None:
    """The folder for results, created if missing. Raises `SettingsError` before anything is measured."""
    if settings.output.out is None:
        if settings.output.requests or settings.output.keep_streams:
            flag = "--requests" if settings.output.requests else "--keep-streams"
            raise SettingsError(f"{flag} writes to a file; name its folder with --out")
        return None
    if settings.output.plots:
        require_matplotlib()
    folder = Path(settings.output.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(path: Path, error: OSError) -> SettingsError:
    return SettingsError(f"--out: {path} cannot be written: {error.strerror}; name a folder that can")


def show(measured: Measured) -> None:
    """Print the table of a run."""
    print(table(measured), flush=True)


def conclude(bench: Bench, runs: list[Measured], written: Written) -> int:
    """Print the comparison and write the files; the exit code.

    3 if the client was too slow in a run. Raises `StartError` (2) if no request was completed, or the error that
    stopped the command.
    """
    is_several = len({(one.run.position, one.run.seed) for one in runs}) > 1
    if is_several:
        _say(spread_table(runs) + "\n")
    if written.stop is not None:
        _say("PARTIAL: stopped before all runs were measured\n")
    _say(foot(runs, bench.slo, bench.text_size))
    if written.folder is not None:
        for path in _write(bench.settings, runs, written, written.folder):
            _say(f"written: {path}")
    if isinstance(written.stop, StartError):
        raise written.stop
    if written.stop is not None or any(one.run.is_partial for one in runs):
        return DONE  # Ctrl-C is no failure, here as in `plait serve`
    return _judge(runs)


def _say(words: str) -> None:
    """Print, if standard output still has a reader."""
    try:
        print(words, flush=True)
    except BrokenPipeError:
        discard_output()


def _write(settings: BenchSettings, runs: list[Measured], written: Written, folder: Path) -> list[Path]:
    name = "-".join(["bench", written.name, *_slug(settings)])
    path = folder / f"{name}.json"
    result = record(written.command, runs, ratios(runs), settings.output.requests)
    result["is_partial"] = written.stop is not None or any(one.run.is_partial for one in runs)
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        plots = draw(runs, folder, name) if settings.output.plots else []
    except OSError as error:
        raise _unwritable(path, error) from error
    return [path, *plots]


def _slug(settings: BenchSettings) -> list[str]:
    """The load's part of a file name."""
    load = settings.load
    named = load.profile or load.trace or load.prompts
    return [re.sub(r"[^a-z0-9]+", "-", Path(named).stem.lower()).strip("-")] if named is not None else []


def _judge(runs: list[Measured]) -> int:
    if not any(one.metrics.num_completed for one in runs):
        raise StartError("no request was completed; the tables above list the failures", ExitCode.SETTINGS)
    late = next((one.client_lag.reasons for one in runs if one.client_lag.reasons), None)
    if late is None:
        return DONE
    print(
        f"plait: a run is invalid (exit code {ExitCode.HARDWARE}): the client was late: {'; '.join(late)}. Its metrics "
        "are not the server's: use more --processes, another machine for the client, or a lighter load; --max-lag-ms "
        "sets the limit",
        file=sys.stderr,
        flush=True,
    )
    return ExitCode.HARDWARE
