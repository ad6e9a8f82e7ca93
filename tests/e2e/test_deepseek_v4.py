"""DeepSeek-V4 over HTTP: transformers' tokens whatever shares a step, and prefixes found where snapshots are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from plait_testing.deepseek_v4 import DENSE
from plait_testing.metrics import read_metrics
from plait_testing.recording import Record
from plait_testing.running_server import Server, StartServer, start_server
from plait_testing.v4_server import GAP, NUM_OUTPUT, Model, ask, num_cached, output_of, poison_caches, some_ids

NUM_PAGES, NUM_SNAPSHOTS = 64, 40
SNAPSHOT_STATES = ("findable", "free", "parked", "writing")
PREEMPTED = "plait_preemptions_total"
WAYS: dict[str, tuple[str, ...]] = {
    "pages for a quarter, few snapshots": ("--num-snapshots", "3", "--watermark", "0"),
    "chunks of 7": ("--max-batch-tokens", "32", "--long-prefill", "7"),
    "chunks of 1": ("--max-batch-tokens", "32", "--long-prefill", "1"),
    "chunks of 64": ("--long-prefill", "64"),
    "not mixed": ("--no-mixed",),
    "no overlap": ("--no-overlap",),
    "no prefix cache": ("--no-prefix-cache",),
    "two ranks": ("--tp", "2"),
    "four ranks": ("--tp", "4"),
}


@pytest.fixture(scope="module")
def model(check_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("v4"), check_models / "recall-gqa")


@pytest.mark.acceptance("deepseek-v4")
def test_tokens_are_transformers_in_every_way(
    model: Model, server: StartServer, sized: Callable[[int, int], int], record: Record, tmp_path: Path
) -> None:
    """At full size once more over poisoned caches: a step that writes elsewhere ends the server."""
    num_prompts, longest, num_output = sized(8, 64), sized(160, 600), sized(24, 96)
    prompts = [some_ids(1 + (longest - 1) * i // (num_prompts - 1), i) for i in range(num_prompts)]
    random.Random(0).shuffle(prompts)
    checks = tmp_path / "checks"
    checks.mkdir()
    for caches, way in list(itertools.product(("", ", poisoned caches"), WAYS))[: sized(1, 2 * len(WAYS))]:
        pages = sized(16, 44) if "a quarter" in way else 512
        limits = ("--max-seqs", "8", "--max-model-len", str(longest + num_output), "--num-pages", str(pages))
        with pytest.MonkeyPatch.context() as patch:
            if caches:
                poison_caches(patch, checks)
            one = server(model.path, "--dtype", "float32", "--page-size", "16", *limits, *WAYS[way])
        assert one.url, one.errors
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(partial(ask, one, max_tokens=num_output), prompts))
        gaps = [model.check(prompt, output_of(answer)) for prompt, answer in zip(prompts, answers, strict=True)]
        num_preempted = read_metrics(one.url)[PREEMPTED]
        assert "a quarter" not in way or num_preempted >= sized(1, 21)
        record(f"HTTP, {way}{caches}", "largest_gap_to_transformers_best_logit", "1", max(gaps), GAP)
        record(f"HTTP, {way}{caches}", "preemptions", "preemptions", num_preempted)
        if caches:
            record(f"HTTP, {way}{caches}", "checked_steps", "steps", sum(map(num_checked, checks.iterdir())))
            assert all(num_checked(rank) > 0 for rank in checks.iterdir())
        one.stop()


def num_checked(rank: Path) -> int:
    return int(rank.read_text())


@pytest.fixture(scope="module")
def cached_server(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With pages of 256 tokens, the family's number, of which most are free."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    pages = ("--num-pages", str(NUM_PAGES), "--num-snapshots", str(NUM_SNAPSHOTS), "--enable-prompt-tokens-details")
    one = start_server(log, model.path, "--dtype", "float32", "--max-seqs", "4", "--max-model-len", "2048", *pages)
    assert one.url, one.errors
    yield one
    one.kill()


def test_a_page_has_256_tokens_if_nothing_is_said(cached_server: Server) -> None:
    assert "64 pages of 256 = 16,384 tokens" in cached_server.read_line("memory")


@pytest.mark.parametrize(("kwargs", "mark"), [({}, "</think>"), ({"thinking": True}, "<think>")])
def test_a_folder_without_a_template_gets_deepseeks_own_messages(
    kwargs: dict[str, bool], mark: str, cached_server: Server
) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    body = {"messages": messages, "chat_template_kwargs": kwargs}
    tokens = httpx.post(f"{cached_server.url}/tokenize", json=body).json()["tokens"]
    text = httpx.post(f"{cached_server.url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text.replace("\uff5c", "|") == f"<|begin▁of▁sentence|>s<|User|>u<|Assistant|>{mark}"
    answer = httpx.post(f"{cached_server.url}/v1/chat/completions", json=body | {"max_tokens": 4}, timeout=60)
    assert answer.status_code == 200, answer.text
    tools = [{"type": "function", "function": {"name": "f"}}]
    refused = httpx.post(f"{cached_server.url}/v1/chat/completions", json=body | {"tools": tools})
    assert refused.status_code == 400, refused.text
    assert "tools" in refused.json()["error"]["message"]


@pytest.mark.acceptance("deepseek-v4")
def test_two_conversations_in_turns_compute_less_than_a_page_and_their_new_tokens(
    model: Model, cached_server: Server, sized: Callable[[int, int], int]
) -> None:
    """With most of the pool free, nothing that was just used is missed."""
    histories = [some_ids(300, 101), some_ids(420, 102)]
    for turn in range(sized(2, 6)):
        for talker, history in enumerate(histories):
            answer = ask(cached_server, history)
            if turn:
                model.check(history, output_of(answer))
                new = 90 + 10 * talker
                assert len(history) - num_cached(answer) < 256 + new + NUM_OUTPUT
            history += output_of(answer) + some_ids(90 + 10 * talker, 200 + 10 * turn + talker)
    assert read_metrics(cached_server.url)['plait_kv_pages{state="free"}'] >= 0.88 * NUM_PAGES


@pytest.mark.acceptance("deepseek-v4")
@pytest.mark.parametrize(("length", "num_misses"), [(1000, 2), (700, 1)])
def test_a_shared_beginning_is_learnt_by_its_first_miss(
    length: int, num_misses: int, model: Model, cached_server: Server, sized: Callable[[int, int], int]
) -> None:
    """The first prompt's last boundary is 768 of 1,000 tokens, and 512 of 700: only that is shared."""
    shared = some_ids(600, length)
    prompts = [shared + some_ids(length - 600, 300 + length + i) for i in range(sized(4, 10))]
    answers = [ask(cached_server, prompt, 4) for prompt in prompts]
    assert [num_cached(answer) for answer in answers] == [0] * num_misses + [512] * (len(prompts) - num_misses)
    model.check(prompts[-1], output_of(answers[-1]))
    counts = read_metrics(cached_server.url)
    by_state = {state: counts[f'plait_kv_snapshots{{state="{state}"}}'] for state in SNAPSHOT_STATES}
    assert sum(by_state.values()) == NUM_SNAPSHOTS
    assert by_state["findable"] > 0


def test_dense_layers_alone_keep_nothing_in_pages_and_find_prefixes(
    check_models: Path, tmp_path: Path, server: StartServer
) -> None:
    """Their pages take no memory, and are as many as the slots can fill."""
    dense = Model(tmp_path, check_models / "recall-gqa", layer_types=[DENSE] * 5)
    flags = ("--max-model-len", "512", "--max-seqs", "2", "--num-snapshots", "8", "--enable-prompt-tokens-details")
    one = server(dense.path, "--dtype", "float32", *flags)
    assert one.url, one.errors
    assert "4 pages of 256 = 1,024 tokens" in one.read_line("memory")
    prompts = [some_ids(length, length) for length in (1, 17, 130, 300, 300)]
    answers = [ask(one, prompt) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        dense.check(prompt, output_of(answer))
    assert [num_cached(answer) for answer in answers] == [0, 0, 0, 0, 256]


def test_a_page_that_cuts_entries_is_refused(model: Model, server: StartServer) -> None:
    one = server(model.path, "--dtype", "float32", "--page-size", "8")
    assert not one.url
    assert "must be a multiple of 16" in one.last_line
