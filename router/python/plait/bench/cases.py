"""From settings to the cases of a benchmark."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from plait.bench.datasets import read_prompts, read_trace
from plait.bench.lengths import read_lengths, read_own_lengths
from plait.bench.load import Case, FromFile, Random, Source, Trace
from plait.bench.pace import ClosedLoop, OpenLoop, Pace, TraceReplay
from plait.bench.profiles import FEWEST_PROMPTS, PROFILES, Profile, scaled
from plait.bench.settings import MAX_PROMPTS, BenchSettings, LoadSettings, PaceSettings
from plait.bench.slo import read_slo
from plait.errors import SettingsError

PLAIN = Profile(input_len="128", output_len="128", num_prompts=100)
"""Used without --profile."""
PREFIX_LEN = 256
ALMOST_ALL = 0.999
"""Quantile that stands for the longest prompt: some distributions have no maximum."""
MAX_TOTAL_TOKENS = 200_000_000
"""Prompt tokens of a load. Bodies are built before the run and held in memory, about six bytes a token."""


def cases(settings: BenchSettings) -> list[Case]:
    """The cases to measure; raises `SettingsError` if settings contradict each other."""
    _check(settings)
    load = settings.load
    profile = scaled(PROFILES[load.profile], load.scale) if load.profile is not None else PLAIN
    source = _source(settings, profile)
    made = [_case(settings, profile, source, pace) for pace in _choose_paces(settings, profile)]
    for case in made:
        _check_size(case)
    return made


def _case(settings: BenchSettings, profile: Profile, source: Source, pace: Pace) -> Case:
    load = settings.load
    num = load.num_prompts or (
        len(source.rows) if not isinstance(source, Random) else _num_prompts(profile, pace, load.duration)
    )
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
        case ClosedLoop():
            return f"{pace.num_streams}"
        case OpenLoop():
            return f"{pace.rate:g}/s"
        case TraceReplay():
            return f"{pace.speed:g}x"


def _num_prompts(profile: Profile, pace: Pace, duration: float | None) -> int:
    if isinstance(pace, OpenLoop) and duration is not None:
        return math.ceil(pace.rate * duration) + 1  # the first is due at once
    if isinstance(pace, ClosedLoop):
        return max(FEWEST_PROMPTS, profile.per_stream * pace.num_streams)
    return profile.num_prompts


def _choose_paces(settings: BenchSettings, profile: Profile) -> list[Pace]:
    pace = settings.pace
    cap = pace.max_concurrency or profile.cap
    if pace.rate is not None:
        return [_open(pace, pace.rate, cap)]
    if pace.concurrency is not None:
        return [ClosedLoop(pace.concurrency)]
    if settings.load.trace is not None:
        return [TraceReplay(pace.speed, cap)]
    if profile.rates:
        return [_open(pace, rate, cap) for rate in profile.rates]
    return [ClosedLoop(num) for num in profile.streams or (1,)]


def _open(pace: PaceSettings, rate: float, cap: int | None) -> OpenLoop:
    return OpenLoop(rate, pace.burstiness if pace.arrivals == "gamma" else None, cap)


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
        num_prefixes, prefix_len = load.num_prefixes, load.prefix_len or PREFIX_LEN
    inputs = read_own_lengths("--input-len", load.input_len or profile.input_len)
    longest = inputs.quantile(ALMOST_ALL)
    if num_prefixes and prefix_len >= longest:
        raise SettingsError(
            f"prompts share prefixes of {prefix_len} tokens and have at most {longest:.0f}; lower --prefix-len, or "
            "raise --input-len"
        )
    return Random(inputs, read_lengths("--output-len", output_len), num_prefixes, prefix_len)


def _check(settings: BenchSettings) -> None:
    """Raise `SettingsError` if a setting would be ignored."""
    for is_wrong, message in (*_wrong_paces(settings), *_wrong_loads(settings), *_wrong_answers(settings)):
        if is_wrong:
            raise SettingsError(message)


def _wrong_paces(settings: BenchSettings) -> Iterator[tuple[bool, str]]:
    load, pace = settings.load, settings.pace
    profile_rates = load.profile is not None and bool(PROFILES[load.profile].rates) and pace.concurrency is None
    has_rate = pace.rate is not None or (profile_rates and load.trace is None)
    has_clock = load.trace is not None and pace.rate is None and pace.concurrency is None
    yield pace.rate is not None and pace.concurrency is not None, "--rate and --concurrency are both given; give one"
    yield (
        pace.max_concurrency is not None and not (has_rate or has_clock),
        "--max-concurrency needs an open loop; give --rate too, or use --concurrency",
    )
    yield (
        (pace.arrivals == "fixed" or pace.burstiness != 1) and not has_rate,
        "--arrivals and --burstiness need an open loop; give --rate too, or leave them out",
    )
    yield pace.arrivals == "fixed" and pace.burstiness != 1, "--burstiness needs --arrivals gamma; leave one out"
    yield (
        pace.speed != 1 and not has_clock,
        "--speed scales a trace's clock; give --trace, and neither --rate nor --concurrency",
    )
    yield (
        load.duration is not None and load.num_prompts is None and not (has_rate or has_clock),
        "--duration of a closed loop needs --num-prompts: requests are built before the run starts",
    )


def _wrong_loads(settings: BenchSettings) -> Iterator[tuple[bool, str]]:
    load = settings.load
    sources = [name for name in ("trace", "prompts", "profile", "text") if getattr(load, name) is not None]
    is_shaped = load.input_len is not None or load.output_len is not None or load.num_prefixes > 0
    has_text = settings.server.api == "chat" or load.text is not None
    yield (
        len(sources) > 1 and sources != ["profile", "text"],
        f"{' and '.join('--' + name for name in sources)} name several loads; give one of them",
    )
    yield load.trace is not None and is_shaped, "a trace has its own lengths and prefixes; leave those settings out"
    yield (
        load.prompts is not None and (load.input_len is not None or load.num_prefixes > 0),
        "--prompts have their own lengths and prefixes; leave --input-len and --num-prefixes out",
    )
    yield (
        load.prefix_len is not None and load.num_prefixes == 0,
        "--prefix-len is the length of shared prefixes; give --num-prefixes too",
    )
    yield (
        load.token_range is not None and has_text,
        "--token-range needs prompts of token ids; leave it out for --api chat and --text",
    )


def _wrong_answers(settings: BenchSettings) -> Iterator[tuple[bool, str]]:
    words = settings.measure.slo
    yield (
        words is not None and not settings.server.stream and read_slo(words).needs_stream,
        f"--slo is {words!r}, which needs streamed responses; leave --no-stream out, or limit e2e alone",
    )
    yield (
        settings.server.top_p < 1 and settings.server.temperature == 0,
        f"--top-p {settings.server.top_p:g} has no effect at temperature 0; give --temperature too, or leave it out",
    )


def _check_size(case: Case) -> None:
    if isinstance(case.source, Random) and case.num_prompts > MAX_PROMPTS:
        raise SettingsError(
            f"--rate and --duration ask for {case.num_prompts} prompts; at most {MAX_PROMPTS} are built for a run; "
            "lower one of them"
        )
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
            f"{MAX_TOTAL_TOKENS} are built for a run; lower --num-prompts or --scale"
        )
