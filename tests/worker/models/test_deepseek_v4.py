"""DeepSeek-V4 computes what transformers computes, wherever chunks end and whatever shares a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from plait_testing.deepseek_v4 import CONFIGS, DENSE, VOCAB, V4Driver, random_ids, random_v4, reference_logprobs
from plait_testing.rank_threads import on_every_rank
from plait_testing.recording import Record
from plait_testing.v4_faults import FAULTS
from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.compressed.torch_compressed import MAX_GATHERED, CompressedStep, alike
from plait_worker.attention.spec import CompressedShape
from plait_worker.models.loader import load_model
from plait_worker.models.model import Model
from plait_worker.parallel import Parallel
from plait_worker.rows import Rows
from torch import Tensor

CPU = torch.device("cpu")
LIMIT = 1e-4
"""Of a log-probability: rounding gives 1e-5, the smallest of the faults 5e-3."""
assert_close = partial(torch.testing.assert_close, atol=LIMIT, rtol=0)
LARGEST = "largest_difference_of_a_log_probability", "nats"
LENGTHS = {"real ratios": 430}
CHUNKS = (2, 1, 3, 7, 4, 5, 17, 16, 31, 129, 64, 127, 430, 128)


class Case(NamedTuple):
    """A loaded model, and what transformers computes for a prompt."""

    model: Model[Any]
    ids: list[int]
    expected: Tensor

    def driver(self, **settings: Any) -> V4Driver:
        return V4Driver(self.model, self.page_size, **settings)

    @property
    def page_size(self) -> int:
        compressed = self.model.config.compressed
        assert compressed is not None
        return compressed.page_multiple


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @cache
    def case_of(name: str) -> Case:
        path, reference = tmp_path_factory.mktemp("v4"), random_v4(name)
        reference.save_pretrained(path)
        ids = random_ids(LENGTHS.get(name, 160))
        return Case(load_model(path, "float32", CPU, Parallel()), ids, reference_logprobs(reference, ids))

    return case_of


def in_chunks(driver: V4Driver, ids: Sequence[int], chunk: int, name: str = "a") -> Tensor:
    """Of every position of a prompt."""
    return torch.cat([driver.step({name: ids[i : i + chunk]})[name] for i in range(0, len(ids), chunk)])


@pytest.mark.acceptance("deepseek-v4")
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_equal_transformers_in_chunks(
    name: str, case_of: Callable[[str], Case], sized: Callable[[int, int], int], record: Record
) -> None:
    case = case_of(name)
    assert case.expected.std() > 0.4, "a nearly uniform model would hide mistakes"
    chunks = CHUNKS[:: sized(3, 1)]
    largest = max(difference(in_chunks(case.driver(), case.ids, chunk), case.expected) for chunk in chunks)
    record(f"{name}, chunks of {', '.join(map(str, sorted(chunks)))}", *LARGEST, largest, LIMIT)
    assert largest <= LIMIT


def difference(given: Tensor, expected: Tensor) -> float:
    """The largest of a log-probability; infinite if one is no number."""
    return float((given - expected).abs().nan_to_num(nan=torch.inf).max())


def mixed_steps(case: Case, num_decoding: int, num_prefilling: int, offset: int, chunk: int) -> float:
    """Decode rows beside chunks: all begin ``offset`` tokens apart, so that blocks close at different rows."""
    largest = 0.0
    driver = case.driver(num_pages=512)
    decoding = {f"d{row}": 1 + offset + 3 * row for row in range(num_decoding)}
    for name, length in decoding.items():
        driver.step({name: case.ids[:length]})
    prompts = {f"p{row}": case.ids[: 80 + 7 * row] for row in range(num_prefilling)}
    while prompts:
        done = {name: driver.lengths.get(name, 0) for name in prompts}
        chunks = {
            name: ids[done[name] : done[name] + chunk + index] for index, (name, ids) in enumerate(prompts.items())
        }
        tokens = {name: case.ids[driver.lengths[name]] for name in decoding}
        starts = {name: driver.lengths.get(name, 0) for name in (*chunks, *tokens)}
        for name, logprobs in driver.step(chunks, tokens).items():
            expected = case.expected[starts[name] : starts[name] + len(logprobs)]
            largest = max(largest, difference(logprobs, expected))
        prompts = {name: ids for name, ids in prompts.items() if driver.lengths[name] < len(ids)}
    return largest


@pytest.mark.acceptance("deepseek-v4")
def test_mixed_steps_equal_transformers_at_every_position_of_a_block(
    case_of: Callable[[str], Case], sized: Callable[[int, int], int], record: Record
) -> None:
    cases = list(itertools.product(range(16), range(1, 6), range(1, 4)))[:: sized(41, 1)]
    largest = max(
        mixed_steps(case_of("mixed"), num_decoding, num_prefilling, offset, chunk=5 + offset)
        for offset, num_decoding, num_prefilling in cases
    )
    record(f"{len(cases)} mixes of 1-5 decode rows and 1-3 prefill rows", *LARGEST, largest, LIMIT)
    assert largest <= LIMIT


@pytest.mark.parametrize("length", [1, 2, 3, 4, 13])
def test_a_prompt_with_few_entries_beside_one_with_many(length: int, case_of: Callable[[str], Case]) -> None:
    """The indexer chooses for all rows of a step if one has more entries than it keeps."""
    case = case_of("mixed")
    driver = case.driver()
    driver.step({"decoding": case.ids[:1], "b": case.ids[:90]})
    given = driver.step({"a": case.ids[:length], "b": case.ids[90:120]}, {"decoding": case.ids[1]})
    assert_close(given["a"], case.expected[:length])
    assert_close(given["b"], case.expected[90:120])
    assert_close(given["decoding"], case.expected[1:2])


def decode_from(case: Case, lengths: Sequence[int], num_decoded: int) -> float:
    """Decode behind prompts of these lengths, several requests a step."""
    largest = 0.0
    for first in range(0, len(lengths), 8):
        driver = case.driver(num_pages=512)
        names = {f"{length}": length for length in lengths[first : first + 8]}
        for name, length in names.items():
            driver.step({name: case.ids[:length]})
        for _ in range(num_decoded):
            positions = {name: driver.lengths[name] for name in names if driver.lengths[name] < len(case.ids)}
            tokens = {name: case.ids[position] for name, position in positions.items()}
            for name, logprobs in driver.step({}, tokens).items():
                largest = max(largest, difference(logprobs[0], case.expected[positions[name]]))
    return largest


@pytest.mark.acceptance("deepseek-v4")
def test_decoding_from_every_length_equals_transformers(
    case_of: Callable[[str], Case], sized: Callable[[int, int], int], record: Record
) -> None:
    lengths = range(1, 301, sized(18, 1))
    largest = decode_from(case_of("real ratios"), lengths, 6)
    record(f"decoding behind prompts of {len(lengths)} lengths from 1 to 300", *LARGEST, largest, LIMIT)
    assert largest <= LIMIT


@pytest.mark.parametrize("name", ["mixed", "real ratios"])
def test_a_snapshot_inside_a_chunk_is_all_that_a_request_needs_beside_its_pages(
    name: str, case_of: Callable[[str], Case]
) -> None:
    case, chunk = case_of(name), case_of(name).page_size + 19
    driver = case.driver()
    boundary = 2 * chunk // case.page_size * case.page_size
    first = driver.step({"a": case.ids[:chunk]})["a"]
    second = driver.step({"a": case.ids[chunk : 2 * chunk]}, saves=[("a", boundary, 2)])["a"]
    assert_close(torch.cat((first, second)), case.expected[: 2 * chunk])
    driver.restore("b", "a", boundary, 2)
    rest = case.ids[boundary:]
    assert_close(in_chunks(driver, rest, 11, "b"), case.expected[boundary:])


def test_a_snapshot_taken_while_decoding_is_that_of_a_chunk(case_of: Callable[[str], Case]) -> None:
    case = case_of("mixed")
    driver, boundary = case.driver(), 3 * case.page_size
    driver.step({"a": case.ids[: boundary - 1]})
    driver.step({}, {"a": case.ids[boundary - 1]}, saves=[("a", boundary, 0)])
    driver.restore("b", "a", boundary, 0)
    assert_close(driver.step({"b": case.ids[boundary:]})["b"], case.expected[boundary:])


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_several_snapshots_of_one_chunk(num_drafts: int, case_of: Callable[[str], Case]) -> None:
    case = case_of("mixed")
    driver, page = case.driver(num_drafts=num_drafts), case.page_size
    driver.step({"a": case.ids[:5]})
    driver.step({"a": case.ids[5:]}, saves=[("a", page, 3), ("a", 5 * page, 1)])
    for snapshot, boundary in ((3, page), (1, 5 * page)):
        driver.restore(f"b{snapshot}", "a", boundary, snapshot)
        logprobs = driver.step({f"b{snapshot}": case.ids[boundary:]})[f"b{snapshot}"]
        assert_close(logprobs, case.expected[boundary:])


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_ring_with_room_for_drafts_keeps_the_window_when_they_are_rejected(num_drafts: int, tmp_path: Path) -> None:
    """Of dense layers; running sums cannot be taken back, and no backend verifies drafts yet."""
    reference, ids = random_v4("mixed", layer_types=[DENSE] * 3, mlp_layer_types=["moe"] * 3), random_ids(90)
    reference.save_pretrained(tmp_path)
    driver = V4Driver(load_model(tmp_path, "float32", CPU, Parallel()), num_drafts=num_drafts)
    driver.step({"a": ids[:30]})
    given = []
    for start in range(30, 88):
        drafts = [(token + 1) % VOCAB for token in ids[start + 1 : start + 3]]
        given.append(driver.step({"a": [ids[start], *drafts]})["a"][0])
        driver.lengths["a"] = start + 1
    expected = reference_logprobs(reference, ids)[30:88]
    if num_drafts:
        assert_close(torch.stack(given), expected)
    else:
        with pytest.raises(AssertionError, match="not close"):
            assert_close(torch.stack(given), expected)


def test_slots_and_pages_of_ended_requests_leave_nothing_behind(case_of: Callable[[str], Case]) -> None:
    case = case_of("mixed")
    driver = case.driver(num_slots=1, num_pages=12)
    for _ in range(3):
        in_chunks(driver, random_ids(100, 7), 23, "old")
        driver.free("old")
        assert_close(in_chunks(driver, case.ids, 31), case.expected)
        driver.free("a")


@pytest.mark.acceptance("deepseek-v4")
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_of_other_servers_fails_the_comparison(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, record: Record
) -> None:
    case = _fresh_case(tmp_path_factory)
    with torch.inference_mode():
        FAULTS[name](monkeypatch, case.model)
    given = in_chunks(case.driver(), case.ids, 7)
    record(f"fault: {name}", *LARGEST, difference(given, case.expected))
    with pytest.raises(AssertionError, match="not close"):
        assert_close(given, case.expected)


_SAVED: dict[str, Any] = {}


def _fresh_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The mixed model, loaded anew: faults change its weights."""
    if not _SAVED:
        path, reference = tmp_path_factory.mktemp("v4"), random_v4("mixed")
        reference.save_pretrained(path)
        ids = random_ids(160)
        _SAVED.update(path=path, ids=ids, expected=reference_logprobs(reference, ids))
    model = load_model(_SAVED["path"], "float32", CPU, Parallel())
    return Case(model, _SAVED["ids"], _SAVED["expected"])


@pytest.mark.acceptance("deepseek-v4")
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_compute_what_one_computes(world: int, tmp_path: Path) -> None:
    reference, ids = random_v4("mixed"), random_ids(90)
    reference.save_pretrained(tmp_path)

    def logprobs(parallel: Parallel) -> Tensor:
        return in_chunks(V4Driver(load_model(tmp_path, "float32", CPU, parallel)), ids, 31)

    expected = reference_logprobs(reference, ids)
    for together in on_every_rank(world, tmp_path, logprobs):
        assert_close(together, expected)


def test_one_deep_row_does_not_pad_short_ones(case_of: Callable[[str], Case]) -> None:
    """Decode rows whose entries are read together have as much padding as entries, at most."""
    step = decode_step(case_of("real ratios").model, [8_000] + [40] * 31 + [8_000] * 2 + [60])
    counts = step.entries.count_T
    for parts in ([tokens for tokens, _rows in step._parts()], [tokens for tokens, _width in step._seen_parts]):
        assert [token for part in parts for token in range(part.start, part.stop)] == list(range(len(counts)))
        padded = sum(int(counts[part].max()) * (part.stop - part.start) for part in parts)
        assert padded <= 2 * int(counts.sum()) + len(counts)


def test_alike_runs_hold_no_more_than_fits() -> None:
    sizes = [MAX_GATHERED // 3] * 7 + [2 * MAX_GATHERED, 5, 5, 5]
    runs = list(alike(sizes))
    assert runs == [slice(0, 3), slice(3, 6), slice(6, 7), slice(7, 8), slice(8, 11)]


def decode_step(model: Model[Any], lengths: Sequence[int]) -> CompressedStep:
    """Of the layers with an indexer, for one token of each request."""
    shape = next(spec for spec in model.attention_specs if isinstance(spec, CompressedShape) and spec.overlaps)
    num, pages = len(lengths), max(lengths) // 256 + 1
    positions, row_ids = torch.tensor(lengths), torch.arange(num)
    table = torch.arange(num * pages, dtype=torch.int32).view(num, pages)
    rows = Rows(0, list(range(num)), list(lengths), [1] * num, torch.zeros_like(positions), positions, table, row_ids)
    return CompressedStep(BackendRequirements(shape, 256, 256, 0, CPU), rows)
