"""`plait bench` against a server that keeps time exactly: nothing is missed, nothing is flattered.

How near its figures are to the truth is measured on a quiet machine, by tests/bench/http/client_truth.py.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from plait import cli
from plait.bench.cases import cases
from plait.bench.client_pool import ClientPool
from plait.bench.load import build_load
from plait.bench.measure import Bench, Measured
from plait.bench.metrics import compute_metrics
from plait.bench.run import send
from plait.bench.server import PROBE_TOKENS
from plait.bench.settings import (
    BenchSettings,
    LoadSettings,
    MeasureSettings,
    OutputSettings,
    PaceSettings,
    ServerSettings,
)
from plait.errors import SettingsError
from plait_proto import ExitCode
from plait_testing.held_port import held_port
from plait_testing.mock_timing import Timing
from plait_testing.running_mock import Mock, as_sent, running_mock

pytestmark = pytest.mark.process
FAST = Timing(ttft=0.004, itl=0.002)
LOAD = LoadSettings(num_prompts=12, input_len="20", output_len="uniform:5-16")
"""Each answer has its own length, which pairs what was sent with what was seen."""
LENGTHS = list(range(5, 17))
STREAMS = PaceSettings(concurrency=4)


@pytest.fixture(scope="module")
def mock() -> Iterator[Mock]:
    """One fast mock for the tests that ask nothing special of it."""
    with running_mock(FAST) as running:
        yield running


def measured(
    mock: Mock,
    pace: PaceSettings = STREAMS,
    load: LoadSettings = LOAD,
    server: ServerSettings | None = None,
    measure: MeasureSettings | None = None,
    num_gathered: int = 0,
) -> Measured:
    """One run against the mock, which answers nobody before `num_gathered` requests are there."""
    measure = measure or MeasureSettings(warmup=0)
    settings = BenchSettings(server=server or ServerSettings(), load=load, pace=pace, measure=measure)
    (case,) = cases(settings)
    bench = Bench(settings, [mock.url])
    mock.gather(num_gathered)
    return bench.measure(case, bench.servers[0], settings.load.seed)


@pytest.mark.parametrize(
    "timing",
    [
        pytest.param(FAST, id="steady"),
        pytest.param(Timing(ttft=0.004, itl=0.004, jitter=0.003), id="jittered"),
        pytest.param(Timing(ttft=0.004, itl=0.002, tokens_per_chunk=3), id="several tokens a chunk"),
        pytest.param(Timing(ttft=0.004, itl=0.004, cut=0.002), id="cut lines"),
        pytest.param(Timing(ttft=0.004, itl=0.002, stall_at=4, stall=0.2), id="stalls"),
        pytest.param(Timing(ttft=0.2, itl=0.002), id="slow first token"),
        pytest.param(Timing(ttft=0.004, itl=0.002, tells="running-usage", tokens_per_chunk=2), id="running usage"),
    ],
)
def test_every_token_is_counted_and_no_latency_is_flattered(timing: Timing) -> None:
    with running_mock(timing) as mock:
        seen = measured(mock)
        truth = compute_metrics(as_sent(seen.run, mock.truth()), None)
    assert seen.metrics.num_completed == 12
    assert sorted(sum(one.tokens) for one in seen.run.outcomes) == LENGTHS
    num_chunks = [-(-length // timing.tokens_per_chunk) for length in LENGTHS]
    assert sorted(len(one.arrivals) for one in seen.run.outcomes) == sorted(num_chunks)
    assert seen.run.counting == timing.tells
    for name in ("ttft", "e2e"):
        latency, true = seen.metrics.latencies[name], truth.latencies[name]
        assert latency is not None
        assert true is not None
        assert all(getattr(latency, column) >= getattr(true, column) for column in ("mean", "p50", "p99", "max"))


def test_a_probe_whose_answer_comes_in_one_chunk_is_repeated_with_a_longer_answer() -> None:
    timing = Timing(ttft=0.004, itl=0.002, tells="running-usage", tokens_per_chunk=PROBE_TOKENS)
    with running_mock(timing) as mock:
        assert measured(mock).run.counting == "running-usage"


@pytest.mark.parametrize(("tells", "counting"), [("usage", "usage"), ("nothing", "chunks")])
def test_a_server_that_tells_less_is_counted_by_what_it_tells(tells: str, counting: str) -> None:
    with running_mock(Timing(ttft=0.004, itl=0.002, tokens_per_chunk=2, tells=tells)) as mock:  # type: ignore[arg-type]
        seen = measured(mock)
    assert seen.run.counting == counting
    num_tokens = seen.metrics.output_tokens_per_second * seen.metrics.duration
    assert num_tokens == pytest.approx(sum(length if counting == "usage" else -(-length // 2) for length in LENGTHS))


def test_a_chat_is_sized_by_the_servers_usage(mock: Mock) -> None:
    seen = measured(mock, server=ServerSettings(api="chat"), load=LoadSettings(num_prompts=4, input_len="50"))
    assert {one.num_prompt_tokens for one in seen.run.outcomes} == {50}


def test_a_whole_answer_has_an_end_and_no_first_token(mock: Mock) -> None:
    seen = measured(mock, server=ServerSettings(stream=False))
    assert seen.metrics.num_completed == 12
    assert seen.metrics.latencies["ttft"] is None
    assert seen.metrics.latencies["e2e"] is not None
    assert seen.metrics.output_tokens_per_second * seen.metrics.duration == pytest.approx(sum(LENGTHS))


def test_a_module_in_the_users_folder_is_not_taken_for_the_clients_own(
    mock: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uvloop.py").write_text("raise SystemExit('taken from the folder')")
    monkeypatch.chdir(tmp_path)
    assert measured(mock).metrics.num_completed == 12


def test_a_closed_loop_keeps_all_its_streams_busy_and_no_more() -> None:
    with running_mock(Timing(ttft=0.05, itl=0.002)) as mock:
        seen = measured(mock, measure=MeasureSettings(processes=2, warmup=0), num_gathered=4)
    assert seen.metrics.peak_concurrency == 4
    assert seen.metrics.num_completed == 12


def test_the_queue_of_a_stalled_server_is_not_hidden() -> None:
    """Ten requests of a tenth of a second each, all due within a hundredth, served one by one."""
    with running_mock(Timing(ttft=0.1, itl=0.0, slots=1)) as mock:
        load = LoadSettings(num_prompts=10, output_len="1")
        seen = measured(mock, PaceSettings(rate=1000.0, arrivals="fixed"), load, num_gathered=10)
    ttft = seen.metrics.latencies["ttft"]
    assert ttft is not None
    assert ttft.max >= 10 * 0.1 - 0.01
    assert seen.metrics.peak_concurrency == 10


def test_waiting_for_the_cap_of_an_open_loop_counts_as_latency() -> None:
    with running_mock(Timing(ttft=0.1, itl=0.0)) as mock:
        pace = PaceSettings(rate=1000.0, arrivals="fixed", max_concurrency=2)
        load, measure = LoadSettings(num_prompts=10, output_len="1"), MeasureSettings(processes=2, warmup=0)
        seen = measured(mock, pace, load, measure=measure, num_gathered=2)
    ttft, wait = seen.metrics.latencies["ttft"], seen.metrics.wait
    assert ttft is not None
    assert wait is not None
    assert seen.metrics.peak_concurrency == 2
    assert ttft.max >= 5 * 0.1 - 0.01
    assert wait.max >= 4 * 0.1 - 0.01


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        ("http-500", "http 500"),
        ("http-429", "http 429"),
        ("error-event", "error event"),
        ("close", "closed before its end"),
    ],
)
def test_failures_are_counted_by_their_kind(failure: str, kind: str) -> None:
    timing = Timing(ttft=0.004, itl=0.002, fail_every=4, failure=failure)  # type: ignore[arg-type]
    with running_mock(timing) as mock:
        seen = measured(mock)
    assert seen.metrics.failures == {kind: 3}
    assert seen.metrics.num_completed == 9


def test_requests_carry_the_sampling_settings(mock: Mock) -> None:
    def asked(server: ServerSettings) -> dict[str, object]:
        settings = BenchSettings(server=server, load=LOAD, pace=STREAMS)
        body: dict[str, object] = json.loads(Bench(settings, [mock.url]).servers[0].body(b"[1000]", 4))
        return body

    sampled = asked(ServerSettings(temperature=0.7, top_p=0.9))
    assert (sampled["temperature"], sampled["top_p"]) == (0.7, 0.9)
    greedy = asked(ServerSettings())
    assert (greedy["temperature"], "top_p" in greedy) == (0.0, False)


def test_an_answer_that_never_ends_holds_its_stream_until_the_timeout() -> None:
    """Each stalls after as many tokens as the probe has."""
    timeout = 0.3
    with (
        running_mock(Timing(ttft=0.004, itl=0.002, stall_at=PROBE_TOKENS, stall=3600.0)) as mock,
        ClientPool(1) as clients,
    ):
        load = LoadSettings(num_prompts=3, output_len=str(PROBE_TOKENS + 1))
        settings = BenchSettings(load=load, pace=PaceSettings(concurrency=1), measure=MeasureSettings(warmup=0))
        server = Bench(settings, [mock.url]).servers[0]
        made = build_load(cases(settings)[0], 0, "salt", None)
        setup = msgspec.structs.replace(server.setup(), timeout_seconds=timeout)
        clients.load(setup, [server.body(b"[1000]", PROBE_TOKENS + 1)] * 3)
        run = send(clients, made, server, 0, None, lambda num_ended, num_in_flight: None)
    metrics = compute_metrics(run, None)
    assert metrics.failures == {"timed out": 3}
    assert metrics.duration >= 3 * timeout
    ended = sorted(run.outcomes, key=lambda one: one.freed)
    assert all(one.freed - one.taken >= timeout for one in ended)
    assert all(after.due == before.freed for before, after in pairwise(ended)), "a held stream is not idle"


def test_a_server_that_goes_away_refuses_the_rest() -> None:
    with running_mock(Timing(ttft=0.02, itl=0.002)) as mock:
        settings = BenchSettings(load=LOAD, pace=PaceSettings(rate=50.0), measure=MeasureSettings(warmup=0))
        bench = Bench(settings, [mock.url])
        mock.process.kill()
        mock.process.wait()
        seen = bench.measure(cases(settings)[0], bench.servers[0], 0)
    assert seen.metrics.failures == {"connection refused": 12}


@pytest.mark.parametrize(
    ("limit", "code", "said"),
    [
        pytest.param("-Sn", 0, "failed      0 ", id="a soft limit is raised"),
        pytest.param("-n", ExitCode.HARDWARE, "failed: client has no socket", id="a hard limit is reported"),
    ],
)
def test_sockets_that_the_client_lacks_are_no_failures_of_the_server(limit: str, code: int, said: str) -> None:
    with running_mock(Timing(ttft=0.5, itl=0.0)) as mock:
        words = f"--url {mock.url} --num-prompts 100 --concurrency 100 --output-len 1 --warmup 0 --processes 1"
        bench = f"exec {sys.executable} -m plait.cli bench serve {words} --max-lag-ms 10000"
        ended = subprocess.run(["bash", "-c", f"ulimit {limit} 64; {bench}"], capture_output=True, text=True)
    assert (ended.returncode, said in ended.stdout) == (code, True), ended.stdout + ended.stderr
    assert ("it had no sockets left" in ended.stdout) is (limit == "-n")


def test_what_an_interruption_leaves_in_flight_counts_as_load() -> None:
    def interrupt(num_ended: int, num_in_flight: int) -> None:
        if num_ended >= 1:
            signal.raise_signal(signal.SIGINT)

    with running_mock(Timing(ttft=0.5, itl=0.2)) as mock, ClientPool(1) as clients:
        load = LoadSettings(num_prompts=2, input_len="2", output_len="1")
        settings = BenchSettings(load=load, pace=PaceSettings(concurrency=2), measure=MeasureSettings(warmup=0))
        server = Bench(settings, [mock.url]).servers[0]
        made = build_load(cases(settings)[0], 0, "salt", None)
        clients.load(server.setup(), [server.body(b"[1000, 1001]", output_len) for output_len in (1, 10_000)])
        run = send(clients, made, server, 0, None, interrupt)
    assert (run.is_partial, run.num_unfinished, len(run.reports[0].in_flight)) == (True, 1, 1)
    assert compute_metrics(run, None).peak_concurrency == 2
    assert compute_metrics(run, None).duration == run.ended - run.begun


def test_a_second_ctrl_c_ends_a_run_at_once() -> None:
    def press_twice(num_ended: int, num_in_flight: int) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    with running_mock(FAST) as mock, ClientPool(1) as clients:
        settings = BenchSettings(load=LOAD, pace=STREAMS, measure=MeasureSettings(warmup=0))
        server = Bench(settings, [mock.url]).servers[0]
        made = build_load(cases(settings)[0], 0, "salt", None)
        clients.load(server.setup(), [server.body(b"[1000]", 4)] * 12)
        with pytest.raises(KeyboardInterrupt):
            send(clients, made, server, 0, None, press_twice)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def bench_command(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "plait.cli", "bench", "serve", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_prints_what_there_is_as_partial(tmp_path: Path) -> None:
    """Some answers never end, so that the run does not."""
    with running_mock(Timing(ttft=0.02, itl=0.01, fail_every=20, failure="hang")) as mock:
        words = ("--num-prompts", "1000", "--output-len", "4", "--out", str(tmp_path), "--no-plots", "--warmup", "0")
        process = bench_command("--url", mock.url, *words)
        while not any(one.num_prompt_tokens == 128 for one in mock.truth()):  # the first requests are shorter
            pass
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "PARTIAL: interrupted" in out
    (described,) = json.loads((tmp_path / "bench-serve.json").read_text())["runs"]
    assert described["is_partial"] is True


def test_runs_that_finished_outlive_a_ctrl_c_between_runs(tmp_path: Path) -> None:
    """The fourth request never ends, which is the second run's warm-up, after a probe and the first run."""
    with running_mock(replace(FAST, fail_every=4, failure="hang")) as mock:
        words = ("--num-prompts", "1", "--output-len", "4", "--repeats", "2", "--warmup", "1", "--no-plots")
        process = bench_command("--url", mock.url, *words, "--out", str(tmp_path))
        assert process.stdout is not None
        while "E2E" not in process.stdout.readline():  # the last line of the first run's table
            pass
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "PARTIAL: stopped before all runs were measured" in out
    result = json.loads((tmp_path / "bench-serve.json").read_text())
    assert (result["is_partial"], [run["is_partial"] for run in result["runs"]]) == (True, [False])


def test_points_that_were_measured_outlive_one_that_cannot_be(
    mock: Mock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "sweep", "--url", mock.url, "--concurrencies", "1,16384", "--input-len", "4000"]
    code = cli.run([*words, "--output-len", "1", "--no-plots", "--out", str(tmp_path)])
    said = capsys.readouterr()
    assert (code, "tokens together" in said.err) == (ExitCode.SETTINGS, True), said.err
    assert len(json.loads((tmp_path / "bench-sweep.json").read_text())["runs"]) == 1


@pytest.mark.parametrize("has_folder", [False, True])
def test_tables_without_a_reader_are_no_error(mock: Mock, tmp_path: Path, has_folder: bool) -> None:
    out = ["--out", str(tmp_path), "--no-plots"] if has_folder else []
    load = ("--num-prompts", "4", "--output-len", "4", "--warmup", "0", "--max-lag-ms", "10000")
    process = bench_command("--url", mock.url, *load, *out)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    assert (process.wait(120), "Traceback" in errors, "Exception" in errors) == (0, False, False), errors
    assert (tmp_path / "bench-serve.json").exists() == has_folder


def test_a_folder_that_takes_no_files_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = cli.run(["bench", "serve", "--url", "http://127.0.0.1:1", "--out", "/proc/self", "--no-plots"])
    assert code == ExitCode.SETTINGS
    assert "--out: /proc/self cannot be written" in capsys.readouterr().err


def test_results_that_cannot_be_written_are_said_after_the_tables(
    mock: Mock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bench-serve.json").mkdir()
    words = ["--url", mock.url, "--num-prompts", "1", "--output-len", "1", "--out", str(tmp_path), "--no-plots"]
    assert cli.run(["bench", "serve", *words]) == ExitCode.SETTINGS
    said = capsys.readouterr()
    assert "completed" in said.out
    assert "bench-serve.json cannot be written: Is a directory" in said.err


def test_servers_alternate_and_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = Timing(ttft=0.2, itl=0.01)
    with running_mock(FAST) as first, running_mock(slow) as second:
        words = ["bench", "serve", "--url", first.url, "--against", second.url, "--repeats", "2", "--num-prompts", "4"]
        code = cli.run([*words, "--output-len", "4", "--out", str(tmp_path), "--requests", "--max-lag-ms", "10000"])
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "bench-serve.json").read_text())
    assert code == 0, printed
    order = [run["case"].split(" | ")[1] for run in result["runs"]]
    assert order == [first.url, second.url, second.url, first.url]
    ratio = next(row["value"] for row in result["rows"] if row["metric"] == "ratio_ttft_p50_median")
    ttft = [statistics.median(one["ttft"] for one in run["requests"]) for run in result["runs"]]
    assert min(ttft[1:3]) >= slow.ttft
    assert ratio == pytest.approx(statistics.median([ttft[1] / ttft[0], ttft[2] / ttft[3]]))
    assert "ratio to the first" in printed
    assert [len(run["requests"]) for run in result["runs"]] == [4] * 4
    assert {"commit", "command", "machine", "versions", "rows"} <= result.keys()
    kinds = {path.name.removeprefix("bench-serve-") for path in tmp_path.glob("*.png")}
    assert kinds == {"itl-tail.png", "ttft-by-prompt.png", "tokens-over-time.png", "pairs.png"}


def test_a_sweep_says_where_the_knee_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_mock(Timing(ttft=0.05, itl=0.0, slots=4)) as mock:
        words = ["bench", "sweep", "--url", mock.url, "--concurrencies", "1,4,16", "--refine", "0", "--output-len", "1"]
        cli.run([*words, "--num-prompts", "16", "--out", str(tmp_path), "--max-lag-ms", "10000"])
    assert "<- knee" in capsys.readouterr().out
    assert (tmp_path / "bench-sweep-latency-by-load.png").stat().st_size > 0


def test_a_run_in_which_everything_fails_ends_with_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with running_mock(Timing(fail_every=5, failure="http-429")) as mock:
        words = ["--url", mock.url, "--num-prompts", "1", "--warmup", "3"]  # the fifth request is the only one
        code = cli.run(["bench", "serve", *words])
    assert code == ExitCode.SETTINGS
    said = capsys.readouterr()
    assert "1 failed: http 429: the mock's queue is full" in said.out
    assert "no request was completed" in said.err


def test_a_client_that_is_too_slow_ends_with_hardware(mock: Mock, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--url", mock.url, "--num-prompts", "20", "--output-len", "4", "--max-lag-ms", "0.0001"]
    code = cli.run(["bench", "serve", *words])
    assert code == ExitCode.HARDWARE
    assert "INVALID: the client was late" in capsys.readouterr().out


def test_a_first_request_takes_the_way_of_the_load(mock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "")
    assert Bench(BenchSettings(load=LOAD), [mock.url]).servers[0].model == "mock"


def test_a_port_that_never_speaks_is_given_up_like_one_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("plait.bench.server.CONNECT_SECONDS", 0.1)
    silent = socket.create_server(("127.0.0.1", 0))
    hang_up = threading.Timer(30.0, silent.close)  # so that waiting for longer has another end
    hang_up.start()
    code = cli.run(["bench", "serve", "--url", f"http://127.0.0.1:{silent.getsockname()[1]}"])
    hang_up.cancel()
    silent.close()
    assert code == ExitCode.SETTINGS
    assert re.search("no OpenAI server at .*timed out", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "{url}/elsewhere"], "no OpenAI server at .*404"),
        (["--url", "{closed}"], "no OpenAI server at .*refused"),
        (["--url", "http://.here:80"], "no OpenAI server at http://.here:80"),
        (["--url", "http://" + 70 * "a"], "no OpenAI server at "),
        (["--url", "tcp://here"], "allowed: http://HOST:PORT"),
        (["--url", "{url}", "--model", "gpt-9"], "--model is 'gpt-9'; .* serves: mock"),
        (["--url", "{url}", "--requests"], "name its folder with --out"),
        (["--url", "{url}", "--count-by", "running-usage"], "continuous_usage_stats"),
        (["--url", "{url}", "--token-range", "5-5"], "allowed: LOW-HIGH"),
        (["--url", "{url}", "--token-range", "0-" + 5000 * "9"], "allowed: LOW-HIGH"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_sentence(
    mock: Mock, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with held_port() as closed:
        given = [word.replace("{url}", mock.url).replace("{closed}", f"http://127.0.0.1:{closed}") for word in words]
        code = cli.run(["bench", "serve", *given])
    assert code == ExitCode.SETTINGS
    assert re.search(said, capsys.readouterr().err)


def test_plots_without_matplotlib_name_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code = cli.run(["bench", "serve", "--url", "http://127.0.0.1:1", "--out", str(tmp_path)])
    assert code == ExitCode.SETTINGS
    assert "pip install 'plait[bench]'" in capsys.readouterr().err


def test_streams_are_kept_token_by_token_where_they_are_wanted(mock: Mock) -> None:
    settings = BenchSettings(load=LOAD, pace=STREAMS, output=OutputSettings(keep_streams=4))
    bench = Bench(settings, [mock.url])
    streams = bench.measure(cases(settings)[0], bench.servers[0], 0).streams
    assert sorted(stream.index for stream in streams) == [0, 3, 6, 9]
    prompts = [msgspec.json.decode(stream.prompt) for stream in streams]
    assert all(len(prompt) == 20 for prompt in prompts)
    assert all(len(stream.answer) in LENGTHS for stream in streams)


def test_streams_are_not_kept_of_a_server_that_tells_no_ids() -> None:
    settings = BenchSettings(load=LOAD, pace=STREAMS, output=OutputSettings(keep_streams=4))
    with running_mock(Timing(tells="usage")) as mock, pytest.raises(SettingsError, match="--keep-streams"):
        Bench(settings, [mock.url])
