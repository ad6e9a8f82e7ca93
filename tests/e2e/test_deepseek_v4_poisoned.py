"""DeepSeek-V4 over HTTP, its caches poisoned: no step reads what is not its own, or writes it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server, start_server
from plait_testing.v4_server import NUM_OUTPUT, Model, ask, num_cached, output_of, poison_caches, some_ids

PAGE = 16
NUM_SNAPSHOTS = 3
PREEMPTED = "plait_preemptions_total"


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each rank says how many steps it checked."""
    return tmp_path_factory.mktemp("poisoned")


@pytest.fixture(scope="module")
def model(check_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("v4"), check_models / "recall-gqa")


@pytest.fixture(scope="module")
def poisoned_server(model: Model, checked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With three snapshots, pages for a few requests, and chunks that end anywhere."""
    with pytest.MonkeyPatch.context() as patch:
        poison_caches(patch, checked)
        sizes = ("--page-size", str(PAGE), "--num-pages", "40", "--num-snapshots", str(NUM_SNAPSHOTS))
        steps = ("--max-seqs", "8", "--max-model-len", "640", "--max-batch-tokens", "96", "--watermark", "0")
        log = tmp_path_factory.mktemp("server") / "server.log"
        flags = (*sizes, *steps, "--snapshot-interval", "64", "--enable-prompt-tokens-details")
        one = start_server(log, model.path, "--dtype", "float32", *flags)
    assert one.url, one.errors
    yield one
    one.kill()


@pytest.fixture(autouse=True)
def every_step_is_checked(poisoned_server: Server, checked: Path) -> Iterator[None]:
    """One rank, whose count has grown behind each test."""
    (counted,) = checked.glob("steps-*")
    before = int(counted.read_text())
    yield
    assert int(counted.read_text()) > before
    assert httpx.get(f"{poisoned_server.url}/ready").status_code == 200, poisoned_server.errors


def abandon(server: Server, prompt: list[int], num_events: int) -> None:
    """Ask for a long answer and hang up behind its first events."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 60, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
        for _, _line in zip(range(num_events), answer.iter_lines(), strict=False):
            pass


@pytest.mark.acceptance("deepseek-v4")
def test_tokens_are_transformers_while_others_hang_up(
    model: Model, poisoned_server: Server, sized: Callable[[int, int], int]
) -> None:
    draw = random.Random(5)
    longest = sized(170, 560)
    prompts = [some_ids(draw.randint(1, longest), seed) for seed in range(sized(8, 64))]
    with ThreadPoolExecutor(8) as pool:
        left = [
            pool.submit(abandon, poisoned_server, some_ids(draw.randint(1, longest), 900 + seed), draw.randint(0, 20))
            for seed in range(sized(6, 32))
        ]
        answers = list(pool.map(lambda prompt: ask(poisoned_server, prompt, 24), prompts))
        for each in left:
            each.result()
    for prompt, answer in zip(prompts, answers, strict=True):
        model.check(prompt, output_of(answer))
    assert read_metrics(poisoned_server.url)[PREEMPTED] >= sized(0, 1)


@pytest.mark.acceptance("deepseek-v4")
def test_conversations_of_six_turns_share_three_snapshots(
    model: Model, poisoned_server: Server, sized: Callable[[int, int], int]
) -> None:
    """Each conversation pushes out the other's snapshots now and then: fewer hits, the same tokens."""
    histories = [some_ids(40, 101), some_ids(70, 102)]
    cached = []
    for turn in range(sized(3, 6)):
        for talker, history in enumerate(histories):
            answer = ask(poisoned_server, history, sized(8, 20))
            model.check(history, output_of(answer))
            cached.append(num_cached(answer))
            history += output_of(answer) + some_ids(20, 200 + 10 * turn + talker)
    assert any(cached), "no turn began with a snapshot"


@pytest.mark.acceptance("deepseek-v4")
def test_prompts_that_share_a_beginning_give_transformers_tokens(
    model: Model, poisoned_server: Server, sized: Callable[[int, int], int]
) -> None:
    shared = some_ids(sized(150, 500), 77)
    prompts = [shared + some_ids(30 + seed, 300 + seed) for seed in range(sized(4, 10))]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda prompt: ask(poisoned_server, prompt, NUM_OUTPUT), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        model.check(prompt, output_of(answer))
    assert any(num_cached(answer) > 0 for answer in answers[2:])
