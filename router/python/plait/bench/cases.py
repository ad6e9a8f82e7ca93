"""From settings to the points that are measured."""

from __future__ import annotations

from pathlib import Path

from plait.bench.files import read_prompts, read_trace
from plait.bench.lengths import read_lengths, read_own_lengths
from plait.bench.load import Case, FromFile, Random, Source, Trace
from plait.bench.pace import Closed, Open, Pace, TraceClock
from plait.bench.profiles import FEWEST_PROMPTS, PROFILES, Profile, scaled
from plait.bench.settings import BenchSettings, LoadSettings, PaceSettings
from plait.errors import SettingsError

PLAIN = Profile(input_len="128", output_len="128", num_prompts=100)
"""Where no profile is named."""
MAX_TOTAL_TOKENS = 200_000_000
"""Prompt tokens of a load: its bodies are made before it starts and held in memory, some six bytes each."""


def cases(settings: BenchSettings) -> list[Case]:
    """The points of a run; raises `SettingsError` where settings contradict each other."""
    _check(settings)
    load = settings.load
    profile = scaled(PROFILES[load.profile], load.scale) if load.profile is not None else PLAIN
    source = _source(settings, profile)
    made = [_case(settings, profile, source, pace) for pace in _paces(settings, profile)]
    for case in made:
        _check_size(case)
    return made


def _case(settings: BenchSettings, profile: Profile, source: Source, pace: Pace) -> Case:
    load = settings.load
    num = load.num_prompts or (len(source.rows) if not isinstance(source, Random) else _num_prompts(profile, pace))
    return Case(f"{_name(load, profile)} @ {_pace_name(pace)}", source, pace, num, load.scale, load.max_len)


def _name(load: LoadSettings, profile: Profile) -> str:
    named = load.trace or load.prompts
    if named is not None:
        return Path(named).stem
    scale = f" x {load.scale:g}" if load.scale != 1 else ""
    if load.profile is not None:
        return load.profile + scale
    return f"{load.input_len or profile.input_len}/{load.output_len or profile.output_len}{scale}"


def _pace_name(pace: Pace) -> str:
    match pace:
        case Closed():
            return f"{pace.num_streams}"
        case Open():
            return f"{pace.rate:g}/s"
        case TraceClock():
            return f"{pace.speed:g}x"


def _num_prompts(profile: Profile, pace: Pace) -> int:
    if isinstance(pace, Closed):
        return max(FEWEST_PROMPTS, profile.per_stream * pace.num_streams)
    return profile.num_prompts


def _paces(settings: BenchSettings, profile: Profile) -> list[Pace]:
    pace = settings.pace
    cap = pace.max_concurrency or profile.cap
    if pace.rate is not None:
        return [_open(pace, pace.rate, cap)]
    if pace.concurrency is not None:
        return [Closed(pace.concurrency)]
    if settings.load.trace is not None:
        return [TraceClock(pace.speed, cap)]
    if profile.rates:
        return [_open(pace, rate, cap) for rate in profile.rates]
    return [Closed(num) for num in profile.streams or (1,)]


def _open(pace: PaceSettings, rate: float, cap: int | None) -> Open:
    return Open(rate, pace.burstiness if pace.arrivals == "gamma" else None, cap)


def _source(settings: BenchSettings, profile: Profile) -> Source:
    load = settings.load
    if load.trace is not None:
        return Trace(tuple(read_trace(Path(load.trace), load.num_prompts or 1 << 40)))
    output_len = load.output_len or profile.output_len
    if load.prompts is not None:
        rows = read_prompts(Path(load.prompts), settings.server.api == "chat")
        return FromFile(tuple(rows), read_own_lengths("--output-len", output_len))
    num_prefixes, prefix_len = profile.num_prefixes, profile.prefix_len
    if load.num_prefixes > 0:
        num_prefixes, prefix_len = load.num_prefixes, load.prefix_len
    inputs = read_own_lengths("--input-len", load.input_len or profile.input_len)
    return Random(inputs, read_lengths("--output-len", output_len), num_prefixes, prefix_len)


def _check(settings: BenchSettings) -> None:
    """Raise `SettingsError` for settings of which one would be ignored."""
    load, pace = settings.load, settings.pace
    is_open = pace.rate is not None or (load.trace is not None and pace.concurrency is None)
    has_rates = is_open or (
        load.profile is not None and bool(PROFILES[load.profile].rates) and pace.concurrency is None
    )
    sources = [name for name in ("trace", "prompts", "profile", "text") if getattr(load, name) is not None]
    is_shaped = load.input_len is not None or load.output_len is not None or load.num_prefixes > 0
    wrong = (
        (pace.rate is not None and pace.concurrency is not None, "--rate and --concurrency are both given; give one"),
        (pace.max_concurrency is not None and not has_rates, "--max-concurrency needs an open loop; give --rate too"),
        (pace.arrivals == "fixed" and pace.burstiness != 1, "--burstiness needs --arrivals gamma; leave one out"),
        (
            pace.speed != 1 and (load.trace is None or pace.rate is not None or pace.concurrency is not None),
            "--speed is of a trace's own clock; give --trace, and neither --rate nor --concurrency",
        ),
        (
            len(sources) > 1 and sources != ["profile", "text"],
            f"{' and '.join('--' + name for name in sources)} name several loads; give one of them",
        ),
        (load.trace is not None and is_shaped, "a trace has its own lengths and prefixes; leave those settings out"),
        (load.prompts is not None and load.input_len is not None, "--prompts have their own --input-len; leave it out"),
        (
            load.duration is not None and load.num_prompts is None and not is_open and load.prompts is None,
            "--duration of a closed loop or a profile needs --num-prompts: requests are made before the run starts",
        ),
    )
    for is_wrong, message in wrong:
        if is_wrong:
            raise SettingsError(message)


def _check_size(case: Case) -> None:
    match case.source:
        case Random(input_len=lengths):
            num_tokens = case.num_prompts * sum(lengths.quantile((rank + 0.5) / 100) for rank in range(100)) / 100
        case Trace(rows=rows):
            num_tokens = sum(row.input_len for row in rows)
        case FromFile():
            num_tokens = 0
    if num_tokens * case.scale > MAX_TOTAL_TOKENS:
        raise SettingsError(
            f"{case.num_prompts} prompts have {num_tokens * case.scale:.3g} tokens together; at most "
            f"{MAX_TOTAL_TOKENS} are made for a run; lower --num-prompts or --scale"
        )
