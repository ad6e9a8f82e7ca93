"""`plait simulate`: run, print and write."""

from __future__ import annotations

from pathlib import Path

import msgspec
from tqdm import tqdm

from plait._router import Simulation
from plait.batch_sizes import check_chunk
from plait.errors import DONE, SettingsError
from plait.simulate.plots import Runs, draw, require_matplotlib
from plait.simulate.report import Report, summary_json
from plait.simulate.settings import SimulateSettings, simulator_settings
from plait.simulate.table import table, tenant_table


def simulate(settings: SimulateSettings) -> int:
    """Simulate, print the results and write them to --out; the exit code. Raises `SettingsError`."""
    check_chunk(settings.scheduler)
    folder = _output_folder(settings)
    name = _mode(settings)
    runs: Runs = {name: run(settings, name)}
    print(table(runs[name].summary))
    if len(runs[name].tenants) > 1:
        print("\n" + tenant_table(runs[name].tenants))
    if folder is not None:
        other = _other_mode(settings)
        runs[_mode(other)] = run(other, _mode(other))
        (folder / "summary.json").write_bytes(summary_json(settings, runs[name]))
        draw(runs, folder)
        print(f"plait: results and plots are in {folder}")
    return DONE


def run(settings: SimulateSettings, name: str) -> Report:
    """Simulate once, with a progress bar called `name` on a terminal. Raises `SettingsError`."""
    try:
        simulation = Simulation(msgspec.json.encode(simulator_settings(settings)))
        with tqdm(total=simulation.num_requests, desc=name, unit="request", leave=False, disable=None) as bar:
            report = simulation.run(lambda num_arrived: bar.update(num_arrived - bar.n))
    except (ValueError, OSError) as error:
        raise SettingsError(str(error)) from error
    return msgspec.json.decode(report, type=Report)


def _output_folder(settings: SimulateSettings) -> Path | None:
    """The folder for the files, created if missing."""
    if settings.output.out is None:
        return None
    require_matplotlib()
    folder = Path(settings.output.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--out is {str(folder)!r}, which cannot be a folder: {error.strerror}") from error
    return folder


def _mode(settings: SimulateSettings) -> str:
    return "mixed" if settings.scheduler.mixed else "mixed off"


def _other_mode(settings: SimulateSettings) -> SimulateSettings:
    """The same settings with the opposite of --mixed, and without a step-time target, which needs mixing."""
    scheduler = settings.scheduler
    other = msgspec.structs.replace(scheduler, mixed=not scheduler.mixed, itl_target_ms=None)
    return msgspec.structs.replace(settings, scheduler=other)
