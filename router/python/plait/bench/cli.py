"""The command line of `plait bench`: serve, latency, throughput and sweep."""

from __future__ import annotations

import argparse
import shlex
from typing import TypeVar

import msgspec

from plait.bench.cases import cases
from plait.bench.load import Case
from plait.bench.settings import BenchSettings
from plait.errors import SettingsError
from plait.flags import Parser, add_flags, read_settings

T = TypeVar("T")

MAX_SERVERS = 8
COMMANDS = {
    "serve": "load a server, or several in alternation, and measure it",
    "latency": "one stream: the latency of a request when nothing else runs",
    "throughput": "all requests at once: the most tokens a second",
    "sweep": "rising rates or concurrencies, to find the knee",
}


def add_commands(bench: argparse.ArgumentParser) -> dict[str, Parser]:
    """Give `plait bench` its commands; their parsers by `bench NAME`."""
    made: dict[str, Parser] = {}
    commands = bench.add_subparsers(dest="bench", metavar="COMMAND", parser_class=Parser)
    for name, meaning in COMMANDS.items():
        parser = commands.add_parser(name, help=meaning, description=meaning, allow_abbrev=False)
        add_flags(parser, BenchSettings)
        made[name] = parser
    made["serve"].add_argument(
        "--against", nargs="+", metavar="URL", default=[], help="further servers, compared with the first"
    )
    _add_sweep_flags(made["sweep"])
    return made


def _add_sweep_flags(sweep: Parser) -> None:
    group = sweep.add_argument_group("Points")
    group.add_argument("--rates", help="open loop: requests a second, separated by commas")
    group.add_argument("--concurrencies", help="closed loop: streams, separated by commas (default: 1, 2, 4, ...)")
    group.add_argument("--refine", default="2", help="extra points around the knee, 0 to 16 (default: 2)")


def bench(args: argparse.Namespace, argv: list[str]) -> int:
    """Run one of the commands; the exit code. `argv` is the command line for the results file.

    0 also after Ctrl-C; 3 if the client was too slow. Raises `StartError` (2) for settings and servers.
    """
    if args.bench is None:
        raise SettingsError(f"no command was given; `plait bench` has {', '.join(COMMANDS)}")
    settings = read_settings(args, BenchSettings)
    command = shlex.join(["plait", *argv])
    match args.bench:
        case "serve":
            return _serve(settings, [settings.server.url, *args.against], command, args.bench)
        case "latency":
            return _serve(_short(settings, "latency"), [settings.server.url], command, args.bench)
        case "throughput":
            return _serve(_short(settings, "throughput"), [settings.server.url], command, args.bench)
    return _sweep(settings, args, command)


def _short(settings: BenchSettings, name: str) -> BenchSettings:
    """The settings of `bench latency` and `bench throughput`, which set the pace themselves."""
    pace = settings.pace
    if pace.concurrency is not None or pace.rate is not None or settings.load.profile is not None:
        raise SettingsError(
            f"`bench {name}` sets the pace itself; leave --concurrency, --rate and --profile out, or use `bench serve`"
        )
    num = settings.load.num_prompts or (10 if name == "latency" else 100)
    load = msgspec.structs.replace(settings.load, num_prompts=num)
    pace = msgspec.structs.replace(pace, concurrency=1 if name == "latency" else num)
    return msgspec.structs.replace(settings, load=load, pace=pace)


def _serve(settings: BenchSettings, urls: list[str], command: str, name: str) -> int:
    from plait.bench.measure import Bench, Measured
    from plait.bench.report import Written, conclude, out_folder, show, until_stopped

    if len(urls) > MAX_SERVERS:
        raise SettingsError(f"--against names {len(urls) - 1} servers; {MAX_SERVERS - 1} are allowed")
    todo = cases(settings)
    out = out_folder(settings)
    bench = Bench(settings, urls)
    runs: list[Measured] = []

    def measure_all() -> None:
        for case, seed, server in _run_order(todo, bench.seeds, bench.servers):
            runs.append(bench.measure(case, server, seed))
            show(runs[-1])
            if runs[-1].run.is_partial:
                break

    stop = until_stopped(measure_all, runs)
    return conclude(bench, runs, Written(out, command, name, stop))


def _run_order(todo: list[Case], seeds: list[int], servers: list[T]) -> list[tuple[Case, int, T]]:
    """The order of runs: servers alternate, and so does the one that goes first."""
    return [
        (case, seed, server)
        for case in todo
        for turn, seed in enumerate(seeds)
        for server in (servers if turn % 2 == 0 else reversed(servers))
    ]


def _sweep(settings: BenchSettings, args: argparse.Namespace, command: str) -> int:
    from plait.bench.measure import Bench, Measured
    from plait.bench.report import Written, conclude, out_folder, show, until_stopped
    from plait.bench.sweep import load_points, read_loads, sweep, sweep_table

    _check_sweep(settings, args)
    is_open = args.rates is not None
    words = args.rates if is_open else args.concurrencies
    flag, most = ("--rates", 100_000.0) if is_open else ("--concurrencies", 16_384.0)
    loads = read_loads(flag, words, most, whole=not is_open) if words is not None else None
    out = out_folder(settings)
    bench = Bench(settings, [settings.server.url])
    num_refined = _read_refine(args.refine)
    runs: list[Measured] = []

    def measure(load: float) -> Measured:
        (case,) = cases(_settings_at_load(settings, load, is_open))
        runs.append(bench.measure(case, bench.servers[0], settings.load.seed))
        show(runs[-1])
        return runs[-1]

    stop = until_stopped(lambda: sweep(measure, loads, num_refined, whole=not is_open), runs)
    points = load_points(runs)
    unit = "requests/s" if is_open else "streams"
    print(sweep_table(points, unit) + "\n")
    return conclude(bench, [point.measured for point in points], Written(out, command, args.bench, stop))


def _settings_at_load(settings: BenchSettings, load: float, is_open: bool) -> BenchSettings:
    pace = settings.pace
    at = msgspec.structs.replace(pace, rate=load) if is_open else msgspec.structs.replace(pace, concurrency=int(load))
    return msgspec.structs.replace(settings, pace=at)


def _check_sweep(settings: BenchSettings, args: argparse.Namespace) -> None:
    pace = settings.pace
    if pace.concurrency is not None or pace.rate is not None or settings.load.profile is not None:
        raise SettingsError(
            "`bench sweep` takes --rates or --concurrencies; leave --concurrency, --rate and --profile out"
        )
    if args.rates is not None and args.concurrencies is not None:
        raise SettingsError("--rates and --concurrencies are both given; give one")


def _read_refine(word: str) -> int:
    if not (word.isdecimal() and len(word) <= 2 and int(word) <= 16):
        raise SettingsError(f"--refine is {word[:80]!r}; allowed: a whole number from 0 to 16")
    return int(word)
