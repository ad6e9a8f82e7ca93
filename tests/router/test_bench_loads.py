"""What `plait bench` sends, and when: lengths, arrivals, shared prefixes, files."""

from __future__ import annotations

import random
import statistics
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from plait.bench.cases import cases
from plait.bench.datasets import MOONCAKE_BLOCK, TraceRow, read_prompts, read_trace
from plait.bench.lengths import read_lengths, read_own_lengths, sample_lengths
from plait.bench.load import Case, Load, Random, Trace, body_prompt, build_load
from plait.bench.pace import ClosedLoop, OpenLoop, Pace, TraceReplay, due_offsets
from plait.bench.profiles import PROFILES
from plait.bench.prompts import Lines, Part, TextSize, TokenIds, VerbatimPrompt, Words
from plait.bench.settings import BenchSettings, LoadSettings, MeasureSettings, PaceSettings, ServerSettings
from plait.errors import SettingsError

DATA = Path(__file__).parents[2].parent / "shared" / "data"
IDS = TokenIds(1000, 2000)
IMPOSSIBLE_LENGTHS = (
    " 0 -5 1.5 x uniform:5 uniform:9-5 lognormal:mean=5 lognormal:mean=5,p99=5 lognormal:mean=1,p99=100 ratio:0.5 "
    "percentiles:101=5 percentiles:50=9,60=5 zipf:2 99999999"
)


def lengths_of(words: str, num: int, seed: int = 0) -> list[int]:
    return sample_lengths(read_own_lengths("--input-len", words), num, random.Random(seed))


def load_of(source: Random | Trace, num: int = 40, seed: int = 0, salt: str = "salt", scale: float = 1.0) -> Load:
    return build_load(Case("case", source, ClosedLoop(1), num, scale), seed, salt, None)


def ids(load: Load, index: int) -> list[int]:
    found: list[int] = msgspec.json.decode(body_prompt(load.requests[index], IDS))
    return found


def shape(input_len: str, output_len: str, num_prefixes: int = 0, prefix_len: int = 0) -> Random:
    inputs = read_own_lengths("--input-len", input_len)
    return Random(inputs, read_lengths("--output-len", output_len), num_prefixes, prefix_len)


def test_fixed_lengths_are_all_alike() -> None:
    assert lengths_of("128", 5) == [128] * 5


def test_uniform_lengths_cover_their_range_evenly() -> None:
    sampled = lengths_of("uniform:101-200", 100)
    assert sorted(sampled) == [round(101 + (rank + 0.5) * 0.99) for rank in range(100)]


def test_a_lognormal_has_the_mean_and_the_p99_that_were_asked_for() -> None:
    sampled = sorted(lengths_of("lognormal:mean=12000,p99=100000", 10_000))
    assert statistics.fmean(sampled) == pytest.approx(12_000, rel=0.02)
    assert sampled[9_899] == pytest.approx(100_000, rel=0.02)


def test_a_lognormal_is_cut_at_its_maximum() -> None:
    assert max(lengths_of("lognormal:mean=12000,p99=100000,max=50000", 1000)) == 50_000


def test_percentiles_are_met_and_joined_by_straight_lines() -> None:
    sampled = sorted(lengths_of("percentiles:0=100,50=900,100=2900", 1000))
    assert sampled[499] == pytest.approx(900, abs=3)
    assert sampled[749] == pytest.approx(1900, abs=3)


def test_every_seed_brings_the_same_lengths_in_another_order() -> None:
    first, second = (lengths_of("lognormal:mean=100,p99=500", 50, seed) for seed in (1, 2))
    assert first != second
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize("words", IMPOSSIBLE_LENGTHS.split(" "))
def test_lengths_that_cannot_be_are_refused_with_the_forms_that_can(words: str) -> None:
    with pytest.raises(SettingsError, match=r"--input-len is .*allowed: 128, uniform"):
        read_own_lengths("--input-len", words)


def test_a_ratio_makes_answers_a_share_of_their_prompts() -> None:
    load = load_of(shape("uniform:100-10000", "ratio:0.01"))
    assert all(one.output_len == max(1, round((one.input_len or 0) / 100)) for one in load.requests)


def test_prompts_of_token_ids_have_exactly_the_length_asked_for() -> None:
    load = load_of(shape("uniform:1-300", "1"))
    assert [len(ids(load, index)) for index in range(40)] == [one.input_len for one in load.requests]
    assert all(1000 <= token < 2000 for token in ids(load, 0))


def test_prompts_share_the_prefixes_that_were_asked_for() -> None:
    load = load_of(shape("100", "1", num_prefixes=3, prefix_len=60))
    heads = [tuple(ids(load, index)[:60]) for index in range(40)]
    assert len(set(heads)) == 3
    assert len({tuple(ids(load, index)[60:]) for index in range(40)}) == 40


def test_a_prompt_keeps_a_token_of_its_own() -> None:
    load = load_of(shape("50", "1", num_prefixes=1, prefix_len=60))
    assert {len(ids(load, index)) for index in range(40)} == {50}
    assert len({tuple(ids(load, index)) for index in range(40)}) > 1
    assert load.num_all_prefix == 40


def test_contents_follow_from_seed_and_salt() -> None:
    source = shape("100", "1")
    same, again, other = (ids(load_of(source, salt=salt), 0) for salt in ("a", "a", "b"))
    assert same == again != other


def test_poisson_arrivals_have_exactly_the_rate_and_exponential_gaps() -> None:
    due = due_offsets(OpenLoop(20.0, 1.0, None), 4001, None, random.Random(0))
    gaps = [late - early for early, late in pairwise(due)]
    assert due[-1] == pytest.approx(200)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (4.0, 0.5)])
def test_burstiness_is_the_shape_of_gamma_gaps(burstiness: float, variation: float) -> None:
    due = due_offsets(OpenLoop(20.0, burstiness, None), 8001, None, random.Random(0))
    gaps = [late - early for early, late in pairwise(due)]
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.08)


@pytest.mark.parametrize("seed", range(20))
def test_the_burstiest_arrivals_keep_the_rate(seed: int) -> None:
    assert due_offsets(OpenLoop(20.0, 0.00001, None), 3, None, random.Random(seed))[-1] == pytest.approx(0.1)


def test_fixed_arrivals_have_one_gap() -> None:
    assert due_offsets(OpenLoop(4.0, None, None), 4, None, random.Random(0)) == [0, 0.25, 0.5, 0.75]


def test_a_trace_keeps_its_own_clock_at_its_speed() -> None:
    assert due_offsets(TraceReplay(2.0, None), 3, [100.0, 101.0, 104.0], random.Random(0)) == [0, 0.5, 2.0]


def test_an_open_loop_ends_with_its_duration() -> None:
    load = build_load(Case("case", shape("9", "1"), OpenLoop(10.0, None, None), 100), 0, "", duration=2.0)
    assert len(load.requests) == 21


def test_requests_over_the_longest_length_are_left_out_and_counted() -> None:
    load = build_load(Case("case", shape("uniform:1-100", "10"), ClosedLoop(1), 100, max_len=60), 0, "", None)
    assert max(one.input_len or 0 for one in load.requests) == 50
    assert load.num_left_out == 50


@pytest.mark.parametrize("pace", [ClosedLoop(1), OpenLoop(1.0, 1.0, None), TraceReplay(1.0, None)])
def test_a_load_of_which_nothing_is_left_is_empty(pace: Pace) -> None:
    source = Trace((TraceRow(0.0, 100, 5),))
    assert build_load(Case("case", source, pace, 1, max_len=10), 0, "", None).requests == []


def mooncake(path: Path, *rows: tuple[int, list[int]]) -> Path:
    lines = [
        {"timestamp": 1000 * i, "input_length": n, "output_length": 3, "hash_ids": h} for i, (n, h) in enumerate(rows)
    ]
    path.write_bytes(b"\n".join(msgspec.json.encode(line) for line in lines))
    return path


def test_equal_hash_ids_of_mooncake_become_equal_tokens(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "trace.jsonl", (1100, [7, 8, 9]), (1300, [7, 8, 4]), (700, [7, 8]))
    load = load_of(Trace(tuple(read_trace(path, 3))))
    first, second, third = (ids(load, index) for index in range(3))
    assert (len(first), len(second), len(third)) == (1100, 1300, 700)
    assert first[: 2 * MOONCAKE_BLOCK] == second[: 2 * MOONCAKE_BLOCK]
    assert first[2 * MOONCAKE_BLOCK] != second[2 * MOONCAKE_BLOCK]
    assert third == first[:700]


def test_a_scaled_trace_still_shares_its_prefixes(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "trace.jsonl", (1100, [7, 8, 9]), (1300, [7, 8, 4]))
    load = load_of(Trace(tuple(read_trace(path, 2))), scale=0.1)
    first, second = ids(load, 0), ids(load, 1)
    assert (len(first), len(second)) == (110, 130)
    assert first[:102] == second[:102]


def test_the_traces_beside_the_checkout_are_read_whole() -> None:
    if not DATA.is_dir():
        pytest.skip("no data beside the checkout")
    azure = read_trace(DATA / "azure_llm_2023_conv.csv", 1 << 40)
    kimi = read_trace(DATA / "mooncake_conversation_first5000.jsonl", 1 << 40)
    assert (len(azure), len(kimi)) == (19_366, 5_000)
    assert (azure[0].input_len, azure[0].output_len) == (374, 44)
    assert azure[1].stamp - azure[0].stamp == pytest.approx(4.314489, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens\n", 1),
        (
            "b.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,5,4\n2023-11-16 18:15:47,five,4\n",
            3,
        ),
        ("c.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,4\n", 2),
        ("d.jsonl", '{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[1]}\n{"timestamp":', 2),
        ("e.jsonl", '{"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[1]}\n', 1),
        pytest.param("g.csv", f"TIMESTAMP,ContextTokens,GeneratedTokens\n{'5' * 140_000},5,4\n", 2, id="a long cell"),
        pytest.param("h.csv", "5" * 140_000, 1, id="a long heading"),
        pytest.param("i.jsonl", '{"a":' + "[" * 100_000, 1, id="nested deeply"),
        ("j.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n\n2023-11-16 18:15:46.6,5,\udcff\n", 3),
        ("f.jsonl", '{"timestamp":0,"input_length":-5,"output_length":1,"hash_ids":[]}\n', 1),
    ],
)
def test_a_malformed_trace_is_refused_by_file_and_line(tmp_path: Path, name: str, text: str, line: int) -> None:
    (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(SettingsError, match=rf"{name}:{line}: "):
        read_trace(tmp_path / name, 10)


@pytest.mark.parametrize(
    ("name", "words"), [("x.txt", "allowed: .csv"), ("x.csv", "cannot be read"), ("y.jsonl", "holds no request")]
)
def test_a_trace_that_is_none_is_refused(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "y.jsonl").write_text("")
    with pytest.raises(SettingsError, match=words):
        read_trace(tmp_path / name, 10)


def test_prompts_of_a_file_are_sent_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Why?"}\n\n{"prompt": [5, 6], "output_len": 7}\n')
    rows = read_prompts(path, chat=False)
    assert [row.prompt for row in rows] == [VerbatimPrompt(b'"Why?"', None), VerbatimPrompt(b"[5,6]", 2)]
    assert [row.output_len for row in rows] == [None, 7]


def test_a_prompt_becomes_a_message_in_chat(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Why?"}\n{"messages": [{"role": "user", "content": "Who?"}]}\n')
    messages = [msgspec.json.decode(row.prompt.json) for row in read_prompts(path, chat=True)]
    assert messages == [[{"role": "user", "content": "Why?"}], [{"role": "user", "content": "Who?"}]]


@pytest.mark.parametrize(
    "line",
    [
        '{"question": "x"}',
        "[]",
        '{"prompt": ""}',
        '{"prompt": [-1]}',
        '{"messages": []}',
        pytest.param('{"messages": [{"content": ' + "[" * 100_000, id="nested deeply"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(SettingsError, match=r"p.jsonl:2: "):
        read_prompts(tmp_path / "p.jsonl", chat=False)


def test_texts_are_sized_by_the_servers_usage() -> None:
    made = Words(chat=True, size=TextSize(tokens_per_piece=2.0, overhead=30)).make((Part("a", 130),))
    assert len(msgspec.json.decode(made)[0]["content"].split()) == 50


def test_a_text_is_cut_into_its_lines() -> None:
    made = Lines(False, TextSize(0.25), ["To be,", "or not to be"]).make((Part("a", 20),))
    text = msgspec.json.decode(made)
    assert len(text) == 80
    assert set(text.split("\n")[:-1]) <= {"To be,", "or not to be"}


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_fits_a_small_machine_by_its_scale(name: str) -> None:
    settings = BenchSettings(load=LoadSettings(profile=name, scale=0.01))  # type: ignore[arg-type]
    for case in cases(settings):
        load = build_load(case, 0, "", None)
        assert 8 <= len(load.requests) <= 60
        assert sum((one.input_len or 0) + one.output_len for one in load.requests) < 20_000


def test_prefill_heavy_is_what_it_is_known_for() -> None:
    case = cases(BenchSettings(load=LoadSettings(profile="prefill-heavy")))[0]
    load = build_load(case, 0, "", None)
    lengths = [one.input_len or 0 for one in load.requests]
    assert statistics.fmean(lengths) == pytest.approx(12_000, rel=0.05)
    assert sum(lengths) == pytest.approx(100 * sum(one.output_len for one in load.requests), rel=0.01)


@pytest.mark.parametrize(
    ("load", "pace", "words"),
    [
        (LoadSettings(), PaceSettings(rate=1.0, concurrency=1), "--rate and --concurrency"),
        (LoadSettings(), PaceSettings(max_concurrency=1), "--max-concurrency needs an open loop"),
        (LoadSettings(), PaceSettings(rate=1.0, arrivals="fixed", burstiness=2.0), "--burstiness needs"),
        (LoadSettings(), PaceSettings(burstiness=2.0), "--arrivals and --burstiness need an open loop"),
        (LoadSettings(num_prefixes=2, prefix_len=128), PaceSettings(), "share prefixes of 128 tokens .* at most 128;"),
        (LoadSettings(profile="sonnet", input_len="100"), PaceSettings(), "share prefixes of 200 tokens"),
        (LoadSettings(prefix_len=5), PaceSettings(), "give --num-prefixes too"),
        (LoadSettings(text="x", token_range="5-9"), PaceSettings(), "--token-range needs prompts of token ids"),
        (LoadSettings(prompts="x", num_prefixes=2), PaceSettings(), "--prompts have their own"),
        (LoadSettings(), PaceSettings(speed=2.0), "--speed scales a trace's clock"),
        (LoadSettings(trace="x", prompts="y"), PaceSettings(), "--trace and --prompts name several loads"),
        (LoadSettings(trace="x", input_len="5"), PaceSettings(), "a trace has its own lengths"),
        (LoadSettings(prompts="x", input_len="5"), PaceSettings(), "--prompts have their own"),
        (LoadSettings(duration=5.0), PaceSettings(), "--duration of a closed loop"),
        (
            LoadSettings(duration=86_400.0, input_len="1"),
            PaceSettings(rate=100.0),
            "--rate and --duration ask for 8640001 prompts",
        ),
        (LoadSettings(num_prompts=100_000, input_len="100000"), PaceSettings(), "tokens together"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(load: LoadSettings, pace: PaceSettings, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        cases(BenchSettings(load=load, pace=pace, server=ServerSettings()))


@pytest.mark.parametrize(("slo", "is_fine"), [("ttft=1ms", False), ("e2e=1s,itl=1ms", False), ("e2e=1s", True)])
def test_limits_on_tokens_need_streamed_answers(slo: str, is_fine: bool) -> None:
    settings = BenchSettings(server=ServerSettings(stream=False), measure=MeasureSettings(slo=slo))
    with nullcontext() if is_fine else pytest.raises(SettingsError, match="leave --no-stream out"):
        cases(settings)


@pytest.mark.parametrize(("temperature", "is_fine"), [(0.0, False), (0.7, True)])
def test_a_share_of_the_tokens_needs_sampling(temperature: float, is_fine: bool) -> None:
    settings = BenchSettings(server=ServerSettings(top_p=0.9, temperature=temperature))
    with nullcontext() if is_fine else pytest.raises(SettingsError, match="give --temperature too"):
        cases(settings)


@pytest.mark.parametrize(("num_prompts", "num_due"), [(None, 500), (200, 200)])
def test_a_rate_lasts_for_its_duration(num_prompts: int | None, num_due: int) -> None:
    load = LoadSettings(duration=50.0, num_prompts=num_prompts)
    (case,) = cases(BenchSettings(load=load, pace=PaceSettings(rate=10.0)))
    due = build_load(case, 0, "salt", 50.0).due
    assert len(due) == pytest.approx(num_due, rel=0.02)
    assert due[-1] == pytest.approx(num_due / 10, abs=1)
