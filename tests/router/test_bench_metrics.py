"""What `plait bench` makes of a run: every figure from a run whose times are known."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from array import array
from types import SimpleNamespace
from typing import cast

import msgspec
import numpy as np
import pytest
from matplotlib.figure import Figure
from plait.bench.client import LagWatch
from plait.bench.client_lag import client_lag
from plait.bench.compare import ratios, spread_table, value
from plait.bench.lengths import Fixed
from plait.bench.load import Case, Load, Random, Request
from plait.bench.measure import Measured
from plait.bench.messages import Outcome, Report
from plait.bench.metrics import Metrics, compute_metrics, tokens_by_second
from plait.bench.pace import ClosedLoop, OpenLoop, Pace
from plait.bench.percentiles import summary
from plait.bench.plots import _itl_tail
from plait.bench.prompts import Part, TextSize
from plait.bench.result_file import rows
from plait.bench.run import Run
from plait.bench.slo import Slo, read_slo
from plait.bench.sweep import knee, knee_words, sweep
from plait.bench.table import notes, table
from plait.errors import SettingsError

CASE = Case("case", Random(Fixed(10), Fixed(4)), ClosedLoop(2), 2)


def outcome(
    index: int,
    times: list[float],
    counts: list[int],
    *,
    ended: float,
    freed: float | None = None,
    intended: float = 0.0,
    failure: str | None = None,
) -> Outcome:
    return Outcome(
        index=index,
        intended=intended,
        due=intended,
        taken=intended,
        ended=ended,
        freed=freed if freed is not None else ended,
        failure=failure,
        detail="",
        finish_reason="length",
        num_prompt_tokens=10,
        num_output_tokens=sum(counts),
        times=array("d", times).tobytes(),
        counts=array("I", counts).tobytes(),
    )


def run_of(
    *outcomes: Outcome,
    lag: float = 0.0,
    cpu: float = 0.1,
    position: int = 0,
    seed: int = 0,
    pace: Pace = CASE.pace,
) -> Run:
    requests = [Request((Part(str(index), 10),), 4) for index in range(len(outcomes))]
    return Run(
        load=Load(msgspec.structs.replace(CASE, pace=pace), requests, [0.0] * len(outcomes), 0),
        server=f"http://server-{position}",
        position=position,
        model="model",
        seed=seed,
        streamed=True,
        counting="token-ids",
        begun=0.0,
        ended=10.0,
        outcomes=list(outcomes),
        reports=[Report(lag, lag, cpu, 0)],
        is_partial=False,
        num_unfinished=0,
    )


def measured_of(run: Run) -> Measured:
    return Measured(run, compute_metrics(run, None), client_lag(run, 0.01))


@pytest.fixture
def run() -> Run:
    """Two answers of four tokens, one of them in two chunks, and a third that failed."""
    return run_of(
        outcome(0, [1.0, 1.5, 2.0, 4.0], [1, 1, 1, 1], ended=4.0),
        outcome(1, [2.0, 3.5], [1, 3], ended=4.0, intended=0.5),
        outcome(2, [], [], ended=0.1, failure="http 429"),
    )


def test_throughput_counts_completed_requests_over_the_duration(run: Run) -> None:
    found = compute_metrics(run, None)
    assert (found.duration, found.num_completed, found.failures) == (4.0, 2, {"http 429": 1})
    assert found.requests_per_second == 0.5
    assert found.output_tokens_per_second == 2.0
    assert found.prompt_tokens_per_second == 5.0
    assert found.total_tokens_per_second == 7.0


def test_the_peak_is_that_of_the_busiest_second(run: Run) -> None:
    assert tokens_by_second(run) == [0, 2, 2, 3, 1]
    assert compute_metrics(run, None).peak_output_tokens_per_second == 3


def test_the_tokens_of_a_whole_answer_arrive_at_its_end() -> None:
    streamed = run_of(outcome(0, [1.0], [1], ended=1.5), outcome(1, [], [], ended=2.5))
    outcomes = [msgspec.structs.replace(one, num_output_tokens=7) for one in streamed.outcomes]
    whole = msgspec.structs.replace(streamed, streamed=False, outcomes=outcomes)
    assert tokens_by_second(whole) == [0, 7, 7]


def test_a_run_without_a_whole_second_has_no_peak() -> None:
    short = measured_of(run_of(outcome(0, [0.1], [1], ended=0.9)))
    assert short.metrics.peak_output_tokens_per_second is None
    assert re.search(r"peak generated tokens/s +-\n", table(short))
    assert "peak_output_tokens_per_second" not in {row.metric for row in rows(short)}


def test_a_stall_at_the_end_of_an_interrupted_run_is_reported() -> None:
    run = run_of(outcome(0, [1.0], [1], ended=1.0), outcome(1, [2.0], [1], ended=2.0, intended=1.0))
    stalled = [msgspec.structs.replace(run.reports[0], in_flight=[1.5, 2.0])]
    found = compute_metrics(msgspec.structs.replace(run, is_partial=True, reports=stalled), None)
    assert (found.duration, found.requests_per_second) == (10.0, 0.2)
    assert found.peak_concurrency == 2
    assert found.mean_concurrency == pytest.approx((1.0 + 1.0 + 8.5 + 8.0) / 10)


def test_concurrency_is_what_was_in_flight(run: Run) -> None:
    found = compute_metrics(run, None)
    assert found.peak_concurrency == 2
    assert found.mean_concurrency == pytest.approx((4.0 + 3.5 + 0.1) / 4)


def test_an_exchange_that_outlasts_its_answer_keeps_its_stream() -> None:
    found = measured_of(run_of(*(outcome(n, [1.0], [1], ended=1.0, freed=2.0, intended=n) for n in range(2))))
    assert (found.metrics.duration, found.metrics.mean_concurrency) == (2.0, 1.5)
    assert found.metrics.peak_concurrency == 2
    assert found.metrics.latencies["e2e"] == summary([1.0, 0.0])


def test_latencies_count_from_the_intended_arrival(run: Run) -> None:
    found = compute_metrics(run, None).latencies
    assert found["ttft"] == summary([1.0, 1.5])
    assert found["e2e"] == summary([4.0, 3.5])
    assert found["tpot"] == summary([1.0, 0.5])


def test_gaps_are_counted_by_chunk_and_by_token(run: Run) -> None:
    found = compute_metrics(run, None).latencies
    assert found["itl"] == summary([0.5, 0.5, 2.0, 1.5])
    assert found["itl_token"] == summary([0.5, 0.5, 2.0, 0.5, 0.5, 0.5])


def test_chunks_of_one_read_share_its_gap() -> None:
    found = compute_metrics(run_of(outcome(0, [1.0, 3.0, 3.0], [1, 1, 1], ended=3.0)), None).latencies
    assert found["itl"] == summary([2.0, 0.0])
    assert found["itl_token"] == summary([1.0, 1.0])


def test_goodput_counts_requests_that_meet_every_limit(run: Run) -> None:
    assert compute_metrics(run, Slo(ttft=1.2)).goodput == 0.25
    assert compute_metrics(run, Slo(itl=1.5)).goodput == 0.25
    assert compute_metrics(run, Slo(ttft=1.2, itl=1.5)).goodput == 0
    assert compute_metrics(run, Slo(e2e=4.0)).goodput == 0.5


def test_a_first_token_that_was_not_seen_meets_no_limit() -> None:
    unseen, single = outcome(0, [], [], ended=1.0), outcome(1, [1.0], [1], ended=1.0)
    assert compute_metrics(run_of(unseen), Slo(ttft=2.0)).goodput == 0
    assert compute_metrics(run_of(unseen, single), Slo(ttft=2.0, tpot=0.1, itl=0.1)).goodput == 1
    assert compute_metrics(run_of(unseen), Slo(e2e=2.0)).goodput == 1


def test_a_run_in_which_nothing_was_completed_has_no_latencies() -> None:
    found = compute_metrics(run_of(outcome(0, [], [], ended=0.1, failure="connection refused")), None)
    assert (found.num_completed, found.requests_per_second) == (0, 0)
    assert set(found.latencies.values()) == {None}
    assert "1 failed: connection refused" in table(
        measured_of(run_of(outcome(0, [], [], ended=1, failure="connection refused")))
    )


def test_percentiles_are_those_of_the_standard_library() -> None:
    values = [float(value * value % 101) for value in range(1, 60)]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    found = summary(values)
    assert found is not None
    assert (found.p50, found.p90, found.p99) == pytest.approx((cuts[49], cuts[89], cuts[98]))
    assert (found.mean, found.max) == pytest.approx((statistics.fmean(values), max(values)))


@pytest.mark.parametrize(
    ("lag", "cpu", "words"), [(0.02, 0.1, "event loop was 20.0 ms late"), (0.0, 0.95, "took 95% of")]
)
def test_a_client_that_was_late_makes_the_run_invalid(lag: float, cpu: float, words: str) -> None:
    late = measured_of(run_of(outcome(0, [1.0], [1], ended=1.0), lag=lag, cpu=cpu))
    assert words in late.client_lag.reasons[0]
    assert "INVALID" in table(late)


def sent_late(pace: Pace) -> Measured:
    """A request that was served for 0.95 s and could have been sent 0.05 s before it was."""
    late = run_of(outcome(0, [1.0], [1], ended=1.0), pace=pace)
    late.outcomes[0] = msgspec.structs.replace(late.outcomes[0], taken=0.05)
    return measured_of(late)


def test_late_sends_make_an_open_loop_invalid() -> None:
    assert sent_late(OpenLoop(1.0, None, None)).client_lag.reasons == ("it sent requests 50.0 ms late (p99)",)


def test_idle_streams_make_a_closed_loop_invalid() -> None:
    (reason,) = sent_late(ClosedLoop(1)).client_lag.reasons
    assert reason == "it sent requests 50.0 ms late (p99), and its streams stood idle for 5.3% of their time"


def test_a_valid_run_says_nothing_of_lateness(run: Run) -> None:
    assert "INVALID" not in table(measured_of(run))


def test_a_client_that_stands_still_is_late_for_all_it_missed() -> None:
    async def stand_still() -> Report:
        watch = LagWatch(asyncio.get_running_loop())
        await asyncio.sleep(0.6)
        time.sleep(0.1)
        await asyncio.sleep(0.02)
        return watch.report(0, [])

    assert asyncio.run(stand_still()).lag_p99 > 0.05


@pytest.mark.parametrize(
    ("words", "slo"),
    [("ttft=500ms,itl=0.1s", Slo(ttft=0.5, itl=0.1)), ("e2e=2s, tpot=50.5ms", Slo(e2e=2.0, tpot=0.0505))],
)
def test_limits_are_read_with_their_units(words: str, slo: Slo) -> None:
    assert read_slo(words) == slo


@pytest.mark.parametrize(
    "words", ["", "ttft", "ttft=5", "ttft=-5ms", "speed=5ms", "ttft=5ms,ttft=6ms", "ttft=5ms;itl=5ms"]
)
def test_limits_without_a_unit_or_a_name_are_refused(words: str) -> None:
    with pytest.raises(SettingsError, match=r"--slo is .*allowed: ttft, tpot, itl and e2e"):
        read_slo(words)


def test_the_foot_tells_answers_and_prompts_of_other_lengths(run: Run) -> None:
    short = run_of(outcome(0, [1.0, 2.0], [1, 1], ended=2.0))
    foot = " ".join(notes([measured_of(short)], None))
    assert "1 of 1 outputs have another length than was asked for" in foot
    assert "off on average" not in foot


def test_the_foot_says_which_texts_have_no_measured_size() -> None:
    assert "from the server's usage" in " ".join(notes([], TextSize(1.5, 3.0, is_measured=True)))
    assert "from the server's usage" not in " ".join(notes([], TextSize()))


def test_the_tail_of_the_gaps_is_a_share_of_all_of_them() -> None:
    axes = Figure().add_subplot()
    _itl_tail(axes, [measured_of(run_of(outcome(0, [1.0, 1.0, 1.0, 2.0, 4.0], [1] * 5, ended=4.0)))])
    assert np.asarray(axes.lines[0].get_xydata()).tolist() == [[1000, 0.5], [2000, 0.25]]


def test_ratios_pair_the_servers_seed_by_seed() -> None:
    ends = {(0, 0): 2.0, (1, 0): 1.0, (0, 1): 4.0, (1, 1): 4.0}
    runs = [
        measured_of(run_of(outcome(0, [1.0], [1], ended=end), position=position, seed=seed))
        for (position, seed), end in ends.items()
    ]
    (found,) = [one for one in ratios(runs) if one.metric == "e2e_p50"]
    assert (found.low, found.median, found.high) == (0.5, 0.75, 1.0)
    assert "0.750 (0.500 - 1.000)" in spread_table(runs)


def test_every_figure_is_a_row_in_seconds(run: Run) -> None:
    found = {row.metric: (row.unit, row.value) for row in rows(measured_of(run))}
    assert found["ttft_mean"] == ("seconds", 1.25)
    assert found["itl_max"] == ("seconds", 2.0)
    assert found["output_tokens_per_second"] == ("tokens/s", 2.0)
    assert found["num_failed"] == ("requests", 1)


def test_a_figure_is_found_by_its_name_in_the_results(run: Run) -> None:
    assert value(measured_of(run), "itl_token_p50") == 0.5
    assert value(measured_of(run), "goodput") is None


def saturating(load: float, served: float = 8.0) -> Measured:
    """A server that has `served` slots of one second each, in a closed loop of `load` streams."""
    e2e = max(1.0, load / served)
    found = cast(Metrics, SimpleNamespace(requests_per_second=load / e2e, latencies={"e2e": summary([e2e])}))
    return cast(Measured, SimpleNamespace(metrics=found, run=SimpleNamespace(is_partial=False)))


def test_a_sweep_finds_the_knee_by_itself() -> None:
    points = sweep(saturating, None, 0, whole=True)
    assert knee(points).load == 8
    assert [point.load for point in points] == [1, 2, 4, 8, 16, 32]


def test_a_knee_at_the_heaviest_load_may_lie_beyond_it() -> None:
    points = sweep(saturating, [1, 2, 4], 0, whole=True)
    assert knee_words(points) == "knee, or beyond it"
    assert knee_words(sweep(saturating, [4, 8, 16], 0, whole=True)) == "knee"


def test_a_sweep_refines_around_the_knee() -> None:
    points = sweep(lambda load: saturating(load, served=6), [1, 4, 16], 3, whole=True)
    assert 4 < knee(points).load < 8
    assert len(points) == 6


def test_a_sweep_ends_where_it_is_interrupted() -> None:
    def measure(load: float) -> Measured:
        measured = saturating(load)
        measured.run.__dict__["is_partial"] = load == 2
        return measured

    assert [point.load for point in sweep(measure, [1, 2, 3], 2, whole=True)] == [1, 2]
