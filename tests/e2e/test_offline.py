"""`plait.LLM`: the tokens of the server, from the same engine without HTTP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from plait import LLM, RequestOutput, SamplingParams
from plait.errors import StartError
from plait.offline.prompts import Prompt
from plait_testing.running_server import Server

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS: list[Prompt] = ["Hello", [72, 101, 108], "k=v; k?", "abc " * 40]
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(check_models: Path) -> Iterator[LLM]:
    with LLM(check_models / "recall-gqa", max_num_seqs=4, threads=1) as one:
        yield one


def completion(server: Server, **body: Any) -> list[dict[str, Any]]:
    """The choices of one call over HTTP."""
    answer = httpx.post(f"{server.url}/v1/completions", json={"return_token_ids": True} | body, timeout=60)
    choices: list[dict[str, Any]] = answer.raise_for_status().json()["choices"]
    return choices


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0, "max_tokens": 12},
        {"temperature": 1.5, "seed": 7, "n": 3, "max_tokens": 12},
        {"temperature": 0, "max_tokens": 30, "stop": [" "], "min_tokens": 2},
        {"temperature": 0, "max_tokens": 8, "structured_outputs": {"choice": ["yes", "no"]}},
    ],
    ids=["greedy", "seeded", "stopped", "constrained"],
)
def test_tokens_are_those_of_the_server(llm: LLM, recall_server: Server, params: dict[str, Any]) -> None:
    outputs = llm.generate(PROMPTS, SamplingParams(**params))
    asked = [completion(recall_server, prompt=[prompt], **params) for prompt in PROMPTS]
    for output, choices in zip(outputs, asked, strict=True):
        assert output.prompt_token_ids == choices[0]["prompt_token_ids"]
        for own, served in zip(output.outputs, choices, strict=True):
            assert (own.text, own.token_ids) == (served["text"], served["token_ids"])
            assert (own.finish_reason, own.stop_reason) == (served["finish_reason"], served["stop_reason"])


def test_a_chat_is_the_servers(llm: LLM, recall_server: Server) -> None:
    [output] = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=8), chat_template_kwargs={"x": 1})
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    answer = httpx.post(f"{recall_server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert output.outputs[0].token_ids == answer["choices"][0]["token_ids"]
    assert output.outputs[0].text == answer["choices"][0]["message"]["content"]
    assert output.prompt_token_ids == answer["prompt_token_ids"]


def test_log_probabilities_have_vllms_form(llm: LLM) -> None:
    [output] = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1))
    [choice] = output.outputs
    assert choice.logprobs is not None
    assert choice.cumulative_logprob is not None
    for token, listed in zip(choice.token_ids, choice.logprobs, strict=True):
        assert len(listed) == 2
        assert listed[token].rank == 1
        assert max(listed.values(), key=lambda it: it.logprob) == listed[token]
    pieces = [choice.logprobs[place][token].decoded_token or "" for place, token in enumerate(choice.token_ids)]
    assert "".join(pieces) == choice.text
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    later = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    assert all(listed is not None and token in listed for token, listed in later)


def test_a_prompt_that_fails_has_its_error_and_the_others_answers(llm: LLM) -> None:
    prompts: list[Prompt] = ["Hello", "x" * 20_000, [1 << 40]]
    outputs = llm.generate(prompts, GREEDY)
    assert [len(output.outputs) for output in outputs] == [1, 0, 0]
    long, unknown = outputs[1].error, outputs[2].error
    assert long is not None
    assert (long.status, long.code) == (400, "context_length_exceeded")
    assert unknown is not None
    assert unknown.param == "prompt"


def test_many_more_prompts_than_the_engine_holds_keep_their_order(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=1 + place % 3) for place in range(60)]
    outputs = llm.generate([[72, 101, 108]] * 60, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + place % 3 for place in range(60)]


def test_after_close_a_call_says_what_to_do(llm: LLM) -> None:
    """The module's last test with this model."""
    llm.close()
    with pytest.raises(RuntimeError, match="the engine has ended; make a new LLM"):
        llm.generate("late")


def test_a_model_that_is_not_there_says_what_to_do() -> None:
    with pytest.raises(StartError, match="there is no file or folder 'nowhere'"):
        LLM("nowhere")
