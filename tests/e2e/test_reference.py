"""Greedy tokens in float32 are transformers' tokens, alone and beside other requests, with any chunks and pages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Event

import httpx
import pytest
from plait_testing.questions import QUESTIONS
from plait_testing.recording import Record
from plait_testing.reference import Judgement, Reference, load_reference
from plait_testing.running_server import StartServer

# Two logits closer than this may swap if a sum has another order.
NEGLIGIBLE_GAP = 1e-3
VARIANTS = {
    "default": (),
    "chunk-7": ("--long-prefill-token-threshold", "7"),
    "chunk-64": ("--long-prefill-token-threshold", "64"),
    "chunk-2048": ("--max-batch-tokens", "2048"),
    "page-16": ("--page-size", "16"),
    "chunk-7+page-16": ("--long-prefill-token-threshold", "7", "--page-size", "16"),
}


@pytest.mark.acceptance("spine")
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_are_the_references(
    variant: str, demo_gguf: Path, server: StartServer, sized: Callable[[int, int], int], record: Record
) -> None:
    """Alone, then beside others. Reduced runs ask other questions, which the prefix cache does not have."""
    running = server(demo_gguf, "--dtype", "float32", *VARIANTS[variant])
    reference, num_questions, output_len = load_reference(demo_gguf), sized(2, 20), sized(16, 64)
    questions = {"alone": QUESTIONS[:num_questions], "in company": QUESTIONS[-num_questions:]}
    for place, asked in questions.items():
        num_others = 0 if place == "alone" else sized(5, 15)
        with others(running.url, num_others), httpx.Client(base_url=running.url, timeout=600) as client:
            answers = [greedy(client, question, output_len) for question in asked]
        judged = [judge(reference, question, *answer) for question, answer in zip(asked, answers, strict=True)]
        keep(record, f"SmolLM2 float32 {variant} {place}", judged)
        assert max(judgement.worst_gap for judgement in judged) <= NEGLIGIBLE_GAP, place


def keep(record: Record, case: str, judged: list[Judgement]) -> None:
    different = sum(judgement.num_different for judgement in judged)
    record(case, "tokens", "tokens", sum(judgement.num_tokens for judgement in judged))
    record(case, "tokens_different", "tokens", different)
    record(case, "worst_logit_gap", "logits", max(judgement.worst_gap for judgement in judged), NEGLIGIBLE_GAP)


def greedy(client: httpx.Client, question: str, output_len: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of the question, in the server's chat template, and of its answer."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "model": client.get("/v1/models").json()["data"][0]["id"],
        "temperature": 0,
        "max_tokens": output_len,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    ids = answer["choices"][0]["token_ids"]
    assert len(ids) == output_len
    return tuple(answer["prompt_token_ids"]), tuple(ids)


@cache
def judge(reference: Reference, question: str, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Judgement:
    """Cached: several variants give the same answer."""
    assert list(prompt) == reference.chat_ids(question)
    return reference.judge(list(prompt), list(answer))


@contextmanager
def others(url: str, num_others: int) -> Iterator[None]:
    """So many requests at any time, of different lengths; each is replaced when it ends."""
    over = Event()

    def keep_asking(seed: int) -> None:
        lengths = random.Random(seed)
        with httpx.Client(base_url=url, timeout=600) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            while not over.is_set():
                prompt = [lengths.randrange(1000, 40000) for _ in range(lengths.randrange(1, 300))]
                body = {"model": model, "prompt": prompt, "max_tokens": lengths.randrange(1, 80), "temperature": 0.8}
                client.post("/v1/completions", json=body).raise_for_status()

    with ThreadPoolExecutor(max(num_others, 1)) as pool:
        asking = [pool.submit(keep_asking, seed) for seed in range(num_others)]
        try:
            yield
        finally:
            over.set()
        for each in asking:
            each.result()
