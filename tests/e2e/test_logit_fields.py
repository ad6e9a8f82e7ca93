"""Penalties, biases and closed tokens, from the front door: their meaning, and the same tokens in every mode."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from plait_testing.metrics import read_metrics
from plait_testing.questions import QUESTIONS
from plait_testing.reference import load_reference
from plait_testing.running_server import Server, StartServer, start_server
from plait_testing.slow_steps import SlowSteps

KILO: list[int] = [256, 260, *b"copy kilo", 261]
"""Answered with `kilo` and the end token 257."""
FLOAT32 = ("--dtype", "float32", "--max-seqs", "8", "--page-size", "16")


@pytest.fixture(scope="module")
def logits_server(check_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """recall-gqa in float32."""
    one = start_server(tmp_path_factory.mktemp("server") / "server.log", check_models / "recall-gqa", *FLOAT32)
    assert one.url, one.errors
    yield one
    one.kill()


def complete(server: Server, **fields: Any) -> Any:
    """The only choice of a completion, with its token ids."""
    body = {"prompt": KILO, "temperature": 0, "return_token_ids": True} | fields
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def rejection(server: Server, **fields: Any) -> Any:
    answer = httpx.post(server.url + "/v1/completions", json={"prompt": "x"} | fields, timeout=60)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_a_bias_moves_tokens(logits_server: Server) -> None:
    assert complete(logits_server, logit_bias={str(ord("k")): -100})["text"][0] != "k"
    assert complete(logits_server, logit_bias={str(ord("z")): 100}, max_tokens=3)["text"] == "zzz"


def test_only_allowed_tokens_are_sampled(logits_server: Server) -> None:
    for temperature in (0, 1, 100):
        text = complete(logits_server, allowed_token_ids=[*b"abc"], temperature=temperature, max_tokens=20)["text"]
        assert re.fullmatch("[abc]{20}", text)


def test_nothing_ends_an_answer_before_its_least_tokens(logits_server: Server) -> None:
    assert len(complete(logits_server)["token_ids"]) == 5
    longer = complete(logits_server, min_tokens=9)
    assert len(longer["token_ids"]) >= 9
    assert 257 not in longer["token_ids"][:8]
    assert complete(logits_server, stop="il")["text"] == "k"
    assert complete(logits_server, stop="il", min_tokens=3)["text"] == "kilo"
    assert complete(logits_server, stop="lo", min_tokens=2)["text"] == "ki"


def test_bad_words_are_left_out(logits_server: Server) -> None:
    text = complete(logits_server, bad_words=["kilo", "ab"], max_tokens=20)["text"]
    assert text.startswith("kil")
    assert "kilo" not in text
    assert complete(logits_server, bad_words=["k"])["text"][:1] != "k"


def test_penalties_lower_what_was_there(logits_server: Server) -> None:
    fields = {"ignore_eos": True, "max_tokens": 48, "logit_bias": {str(ord("z")): 40}}
    assert complete(logits_server, **fields)["text"] == "z" * 48
    assert 1 < complete(logits_server, **fields, frequency_penalty=2)["text"].count("z") < 48
    unbiased = {"ignore_eos": True, "max_tokens": 48}
    assert complete(logits_server, **unbiased, presence_penalty=2) != complete(logits_server, **unbiased)


def test_log_probabilities_stay_the_models_own(logits_server: Server) -> None:
    (plain,) = complete(logits_server, logprobs=0, max_tokens=1)["logprobs"]["token_logprobs"]
    fields = {"logit_bias": {str(ord("k")): 5}, "presence_penalty": 1, "temperature": 0}
    (biased,) = complete(logits_server, logprobs=0, max_tokens=1, **fields)["logprobs"]["token_logprobs"]
    assert biased == plain


def test_log_probabilities_of_given_tokens_come_with_each_token(logits_server: Server) -> None:
    given = [ord("z"), ord("k"), 257]
    names = [f"token_id:{id}" for id in given]
    fields = {"logprob_token_ids": given, "return_tokens_as_token_ids": True}
    every = complete(logits_server, logprobs=20, return_tokens_as_token_ids=True)["logprobs"]["top_logprobs"]
    for asked in (None, 2):
        listed = complete(logits_server, **fields, logprobs=asked)["logprobs"]["top_logprobs"]
        assert len(listed) == len(every) == 5
        for tops, all_best in zip(listed, every, strict=True):
            assert set(names) <= set(tops)
            assert len(tops) <= 1 + len(given) + (asked or 0)
            assert all(tops[name] == all_best[name] for name in tops if name in all_best)
            assert sum(map(math.exp, tops.values())) <= 1.0001


def test_chats_list_given_tokens_behind_the_best_ones_and_each_once(logits_server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "copy kilo"}], "temperature": 0, "max_tokens": 5}
    asked = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True, "stream": True}
    given = {"logprob_token_ids": [ord("k"), ord("z"), ord("k")]}
    answer = httpx.post(logits_server.url + "/v1/chat/completions", json=body | asked | given, timeout=60)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    told = [one for event in events for one in (event["choices"][0].get("logprobs") or {}).get("content", [])]
    assert len(told) == 5
    for token in told:
        names = [top["token"] for top in token["top_logprobs"]]
        assert len(names) == len(set(names)) >= 2
        assert {f"token_id:{ord(letter)}" for letter in "kz"} <= set(names)


def test_given_tokens_are_scored_beside_rows_that_ask_for_others(logits_server: Server) -> None:
    asked: list[dict[str, Any]] = [{}, {"logprobs": 3}, {"logprob_token_ids": [1, 2]}, {"logprob_token_ids": [3]}]
    alone = [complete(logits_server, **fields)["logprobs"] for fields in asked]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda fields: complete(logits_server, **fields)["logprobs"], asked * 2))
    for told, expected in zip(together, alone * 2, strict=True):
        assert (told is None) == (expected is None)
        if told is not None:
            assert [set(tops) for tops in told["top_logprobs"]] == [set(tops) for tops in expected["top_logprobs"]]
            assert told["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-4)


def test_what_cannot_be_is_a_400(logits_server: Server) -> None:
    error = rejection(logits_server, min_tokens=17)
    assert error["message"] == "`min_tokens` is 17, where `max_tokens` is 16; lower it, or raise `max_tokens`"
    error = rejection(logits_server, allowed_token_ids=[107], bad_words=["k"])
    assert error["param"] == "allowed_token_ids"
    assert "128" in rejection(logits_server, logprob_token_ids=[1] * 129)["message"]
    assert rejection(logits_server, logprob_token_ids=[1 << 20])["param"] == "logprob_token_ids"


PROMPT = "Each page has sixteen letters, and each letter is one token; "
ASKED: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.2},
    {"logit_bias": {str(ord("e")): -3.5}, "min_tokens": 40},
    {"bad_words": ["e", "th", "and"], "temperature": 0.8, "seed": 5},
    {"repetition_penalty": 1.1, "frequency_penalty": -0.1, "temperature": 1.5, "top_p": 0.9, "seed": 6},
    {"allowed_token_ids": [*range(97, 123), 32], "frequency_penalty": 1.5, "temperature": 3, "top_k": 9, "seed": 7},
    {"temperature": 1, "seed": 8},
]


def answers(server: Server, is_preempted: bool = False) -> list[list[int]]:
    """Of all at a time, each twice: the second prompts are cached. Preempted: each goes before those before it."""

    def ask(index: int) -> list[int]:
        fields = ASKED[index % len(ASKED)] | ({"priority": -index} if is_preempted else {})
        ids: list[int] = complete(server, prompt=PROMPT * 2, ignore_eos=True, max_tokens=70, **fields)["token_ids"]
        return ids

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, range(2 * len(ASKED))))


MODES = {
    "preempted": ("--max-seqs", "2", "--policy", "priority", "--priority-preemption-threshold", "1"),
    "tp-2-chunks-one-at-a-time": ("--tp", "2", "--threads", "1", "--long-prefill", "23", "--no-overlap", "--no-mixed"),
}


@pytest.fixture(scope="module")
def expected(logits_server: Server) -> list[list[int]]:
    """Each alone, nothing cached but one prompt."""
    return [
        complete(logits_server, prompt=PROMPT * 2, ignore_eos=True, max_tokens=70, **fields)["token_ids"]
        for fields in ASKED
    ]


def test_the_same_tokens_in_company_and_after_prefix_hits(logits_server: Server, expected: list[list[int]]) -> None:
    assert answers(logits_server) == expected * 2


@pytest.mark.parametrize("mode", MODES)
def test_the_same_tokens_in_every_mode(
    mode: str, slow_steps: SlowSteps, check_models: Path, server: StartServer, expected: list[list[int]]
) -> None:
    """Steps are slow until a request has given way, so that some come while others run."""
    running = server(check_models / "recall-gqa", *FLOAT32, *MODES[mode])
    is_preempted = mode.startswith("preempted")
    with ThreadPoolExecutor(1) as pool:
        with slow_steps.within() if is_preempted else nullcontext():
            given = pool.submit(answers, running, is_preempted)
            while is_preempted and num_preempted(running) == 0:
                assert not given.done()
        assert given.result() == expected * 2
    assert (num_preempted(running) > 0) == is_preempted


def num_preempted(running: Server) -> float:
    return read_metrics(running.url)["plait_preemptions_total"]


def test_a_streamed_answer_says_the_same(logits_server: Server) -> None:
    fields = {"prompt": KILO, "temperature": 0, "max_tokens": 30, "min_tokens": 20, "frequency_penalty": 1}
    text = httpx.post(logits_server.url + "/v1/completions", json=fields | {"stream": True}, timeout=60).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == complete(logits_server, **fields)["text"]


@pytest.mark.acceptance("spine")
def test_greedy_tokens_with_a_repetition_penalty_are_the_references(
    demo_gguf: Path, server: StartServer, sized: Callable[[int, int], int]
) -> None:
    """Of SmolLM2 in float32."""
    num_tokens = sized(8, 64)
    running = server(demo_gguf, "--dtype", "float32")
    reference = load_reference(demo_gguf)
    for question, penalty in product(QUESTIONS[: sized(1, 20)], (1.1, 1.3)):
        prompt = reference.chat_ids(question)
        fields = {"repetition_penalty": penalty, "max_tokens": num_tokens, "ignore_eos": True}
        no_end = {"logit_bias": {str(reference.model.generation_config.eos_token_id): -100}}
        given = complete(running, prompt=prompt, **fields, **no_end)["token_ids"]
        with torch.inference_mode():
            answer = reference.model.generate(
                torch.tensor([prompt]),
                do_sample=False,
                repetition_penalty=penalty,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
            )
        assert given == answer[0, len(prompt) :].tolist()
