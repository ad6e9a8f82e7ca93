"""Several answers to one prompt: the prompt is computed once, and each answer is one of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server, start_server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
KILO: list[int] = [256, 260, *b"copy kilo", 261]
"""Answered with `kilo` and the end token 257."""
PAGE_SIZE = 16
LONG: list[int] = [256, 260, *(b"copy " + b"abcdefgh" * 100), 261]
WILD: dict[str, Any] = {"temperature": 2, "ignore_eos": True, "max_tokens": 24, "return_token_ids": True}


@pytest.fixture(scope="module", params=["--prefix-cache", "--no-prefix-cache"])
def choices_server(
    request: pytest.FixtureRequest, check_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """recall-gqa in float32, with and without a prefix cache."""
    flags = ("--dtype", "float32", "--max-seqs", "8", "--page-size", str(PAGE_SIZE), request.param)
    log = tmp_path_factory.mktemp("server") / "server.log"
    one = start_server(log, check_models / "recall-gqa", *flags)
    assert one.url, one.errors
    yield one
    one.kill()


def ask(server: Server, route: str = COMPLETIONS, **fields: Any) -> Any:
    answer = httpx.post(server.url + route, json={"temperature": 0} | fields, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def rejection(server: Server, **fields: Any) -> Any:
    answer = httpx.post(server.url + COMPLETIONS, json={"prompt": "x"} | fields, timeout=60)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def token_ids(server: Server, **fields: Any) -> list[list[int]]:
    """Those of each choice, which come in order."""
    choices = ask(server, **(WILD | fields))["choices"]
    assert [it["index"] for it in choices] == list(range(len(choices)))
    return [it["token_ids"] for it in choices]


def test_a_prompt_is_computed_once_for_more_choices_than_there_are_slots(choices_server: Server) -> None:
    before = read_metrics(choices_server.url)
    answer = ask(choices_server, prompt=LONG, n=20, max_tokens=2, ignore_eos=True)
    assert len({it["text"] for it in answer["choices"]}) == 1
    assert len(answer["choices"]) == 20
    assert answer["usage"]["prompt_tokens"] == len(LONG)
    assert answer["usage"]["completion_tokens"] == 40
    after = read_metrics(choices_server.url)
    computed = 'plait_step_tokens_total{phase="prefill"}'
    assert after[computed] - before[computed] <= len(LONG) + 19 * PAGE_SIZE
    assert after["plait_further_choices_total"] - before["plait_further_choices_total"] == 19


def test_greedy_choices_are_all_the_right_answer(choices_server: Server) -> None:
    answer = ask(choices_server, prompt=[KILO, [*LONG[:30], 261], KILO], n=3, max_tokens=8)
    texts = [it["text"] for it in answer["choices"]]
    assert [texts[i] for i in (0, 1, 2, 6, 7, 8)] == ["kilo"] * 6
    assert len(set(texts[3:6])) == 1


def test_seeded_choices_differ_and_repeat_in_any_company(choices_server: Server) -> None:
    alone = token_ids(choices_server, prompt=KILO, n=4, seed=17)
    assert len({tuple(it) for it in alone}) == 4
    assert token_ids(choices_server, prompt=KILO, seed=17) == alone[:1]
    with ThreadPoolExecutor(6) as pool:
        for seed in range(5):
            pool.submit(ask, choices_server, prompt=LONG[: 90 * seed + 9], n=2, seed=seed, **WILD)
        in_company = pool.submit(token_ids, choices_server, prompt=KILO, n=6, seed=17).result()
    assert in_company[:4] == alone
    assert token_ids(choices_server, prompt=KILO, n=4, seed=18)[1] not in alone


def test_choices_without_a_seed_differ(choices_server: Server) -> None:
    assert len({tuple(it) for it in token_ids(choices_server, prompt=KILO, n=4)}) == 4


def test_penalties_are_each_choices_own(choices_server: Server) -> None:
    fields: dict[str, Any] = {"prompt": KILO, "seed": 3, "n": 4, "frequency_penalty": 2, "repetition_penalty": 1.5}
    alone = token_ids(choices_server, **(fields | {"n": 1}))
    assert token_ids(choices_server, **fields)[0] == alone[0]


def test_a_stream_says_what_the_whole_answer_says(choices_server: Server) -> None:
    asked: dict[str, Any] = {"prompt": [KILO, LONG[:50]], "n": 3, "seed": 5, **WILD}
    whole = ask(choices_server, **asked)
    told: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    text = httpx.post(choices_server.url + COMPLETIONS, json=asked | options, timeout=60).text
    *events, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert done == "[DONE]"
    *chunks, last = map(json.loads, events)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        told.setdefault(choice["index"], []).extend(choice["token_ids"])
        if choice["finish_reason"]:
            ends[choice["index"]] = choice["finish_reason"]
    assert last["usage"] == whole["usage"]
    assert told == {it["index"]: it["token_ids"] for it in whole["choices"]}
    assert ends == {it["index"]: it["finish_reason"] for it in whole["choices"]}


def test_a_chat_has_choices_with_a_message_each(choices_server: Server) -> None:
    messages = [{"role": "user", "content": "copy kilo"}]
    answer = ask(choices_server, CHAT, messages=messages, n=3)
    assert [(it["index"], it["message"]["content"]) for it in answer["choices"]] == [(i, "kilo") for i in range(3)]


def test_a_stop_in_one_choice_leaves_the_others(choices_server: Server) -> None:
    """The stop is a token that one of the choices has and the others do not."""
    free = token_ids(choices_server, prompt=KILO, n=4, seed=17)
    rare = next(it for it in free[2] if all(it not in other for other in free if other is not free[2]))
    stopped = ask(choices_server, prompt=KILO, n=4, seed=17, stop_token_ids=[rare], **WILD)["choices"]
    assert [it["finish_reason"] for it in stopped] == ["length", "length", "stop", "length"]
    assert [it["token_ids"] for it in stopped if it["index"] != 2] == [free[0], free[1], free[3]]


def test_an_echo_has_its_prompt_and_its_scores_in_each_choice(choices_server: Server) -> None:
    answer = ask(choices_server, prompt=KILO, n=3, echo=True, logprobs=0, max_tokens=1)
    first, *others = answer["choices"]
    assert len(first["logprobs"]["token_logprobs"]) == len(KILO) + 1
    for other in others:
        assert other["text"] == first["text"]
        assert other["logprobs"]["token_logprobs"][:-1] == first["logprobs"]["token_logprobs"][:-1]


def test_a_client_that_leaves_ends_all_of_its_choices(choices_server: Server) -> None:
    endless = {"prompt": KILO, "n": 6, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", choices_server.url + COMPLETIONS, json=endless, timeout=60) as got:
        next(got.iter_raw())
    while read_metrics(choices_server.url)["plait_requests_running"] > 0:
        pass
    metrics = read_metrics(choices_server.url)
    assert metrics["plait_requests_waiting"] == 0
    assert metrics['plait_kv_pages{state="leased"}'] == 0


@pytest.mark.parametrize("n", [10**9, 0, -1, 129, "4", 1.5, True, 10**30])
def test_a_number_of_choices_that_is_not_allowed_is_a_400_that_names_it(choices_server: Server, n: object) -> None:
    error = rejection(choices_server, n=n)
    assert error["param"] == "n"
    assert "`n`" in error["message"]


def test_more_choices_than_a_call_may_have_are_refused(choices_server: Server) -> None:
    error = rejection(choices_server, prompt=["a", "b", "c"], n=86)
    assert error["param"] == "n"
    assert "258 choices, where 256 are allowed" in error["message"]
    assert len(ask(choices_server, prompt=["a", "b"], n=128, max_tokens=1)["choices"]) == 256


@pytest.mark.parametrize("fields", [{"best_of": 4}, {"use_beam_search": True}])
def test_what_needs_more_choices_than_are_shown_is_refused(choices_server: Server, fields: dict[str, Any]) -> None:
    assert rejection(choices_server, **fields)["code"] == "unsupported_value"
