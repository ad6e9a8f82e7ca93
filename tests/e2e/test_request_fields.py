"""Small fields of requests, as clients see them: echo, usage so far, stops, special tokens, truncation, templates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from plait_testing.running_server import Server, start_server
from transformers import AutoModelForCausalLM

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
KILO: list[int] = [256, 260, *b"copy kilo", 261]
"""Answered with `kilo` and the end token 257."""
CONTEXT = 1024
TEMPLATE = (
    "{{ enable_thinking }}/{{ thinking }}/{{ reasoning_effort }};"
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}.{% endfor %}"
    "{% if add_generation_prompt %}go{% endif %}"
)


@pytest.fixture(scope="module")
def fields_server(check_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """recall-gqa in float32, with a chat template of ours."""
    folder = tmp_path_factory.mktemp("server")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ["--dtype", "float32", "--max-seqs", "8", "--long-prefill-token-threshold", "100"]
    flags += ["--max-model-len", str(CONTEXT)]
    kwargs = json.dumps({"enable_thinking": "so", "thinking": "usual"})
    flags += ["--chat-template", str(template), "--chat-template-kwargs", kwargs]
    one = start_server(folder / "server.log", check_models / "recall-gqa", *flags)
    assert one.url, one.errors
    yield one
    one.kill()


def ask(server: Server, route: str, **fields: Any) -> Any:
    answer = httpx.post(server.url + route, json={"temperature": 0} | fields, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(server: Server, **fields: Any) -> Any:
    """The only choice of a completion."""
    return ask(server, COMPLETIONS, **({"prompt": KILO} | fields))["choices"][0]


def rejection(server: Server, route: str, **fields: Any) -> Any:
    answer = httpx.post(server.url + route, json=fields, timeout=60)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def chunks(server: Server, route: str, **fields: Any) -> list[Any]:
    text = httpx.post(server.url + route, json={"temperature": 0, "stream": True} | fields, timeout=60).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]", text
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("include_usage", [False, True])
def test_each_chunk_may_say_what_its_choice_has_cost_so_far(fields_server: Server, include_usage: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    for route, prompt in ((COMPLETIONS, {"prompt": KILO}), (CHAT, {"messages": [{"role": "user", "content": "hi"}]})):
        told = chunks(fields_server, route, stream_options=options, max_tokens=5, **prompt)
        counts = [chunk["usage"]["completion_tokens"] for chunk in told]
        assert counts == sorted(counts)
        assert counts[-1] == 5
        assert len({chunk["usage"]["prompt_tokens"] for chunk in told}) == 1
        assert (told[-1]["choices"] == []) is include_usage


def test_an_echo_is_the_prompt_before_the_answer(fields_server: Server) -> None:
    assert complete(fields_server, echo=True)["text"] == "<|bos|><|user|>copy kilo<|assistant|>kilo"
    assert complete(fields_server, prompt="copy kilo", echo=True, max_tokens=1)["text"].startswith("copy kilo")
    told = chunks(fields_server, COMPLETIONS, prompt=["ab", "c"], echo=True, max_tokens=3)
    texts = ["".join(it["choices"][0]["text"] for it in told if it["choices"][0]["index"] == i) for i in (0, 1)]
    assert texts[0].startswith("ab")
    assert texts[1].startswith("c")


def test_an_echo_without_output_is_a_prefill_and_nothing_else(fields_server: Server) -> None:
    answer = ask(fields_server, COMPLETIONS, prompt=KILO, echo=True, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("<|bos|><|user|>copy kilo<|assistant|>", "length")
    assert answer["usage"]["completion_tokens"] == 0
    whole_context = ask(fields_server, COMPLETIONS, prompt=[97] * CONTEXT, max_tokens=0)
    assert whole_context["usage"]["prompt_tokens"] == CONTEXT
    told = chunks(fields_server, COMPLETIONS, prompt="ab", echo=True, max_tokens=0)
    assert [chunk["choices"][0]["text"] for chunk in told] == ["ab", ""]


@torch.inference_mode()
def expected_logprobs(model: Any, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token but the first, and the best of each position."""
    logprobs_TV = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(dim=-1)
    own_T = logprobs_TV.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    return own_T, logprobs_TV.max(dim=-1).values


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echoed_logprobs_are_the_references(fields_server: Server, check_models: Path, max_tokens: int) -> None:
    """As lm-eval asks: prompts of token ids, several in a call, `logprobs` 1."""
    model = AutoModelForCausalLM.from_pretrained(check_models / "recall-gqa", dtype=torch.float32)
    generator = torch.Generator().manual_seed(max_tokens)
    drawn = [torch.randint(32, 127, (length,), generator=generator).tolist() for length in (1, 2, 40, 250)]
    prompts = [*drawn, KILO]
    answer = ask(fields_server, COMPLETIONS, prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens)
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        told = choice["logprobs"]
        assert len(told["tokens"]) == len(prompt) + max_tokens
        assert (told["token_logprobs"][0], told["top_logprobs"][0], told["text_offset"][0]) == (None, None, 0)
        own, best = expected_logprobs(model, prompt)
        given = torch.tensor(told["token_logprobs"][1 : len(prompt)])
        assert torch.allclose(given, own, atol=2e-4), (given - own).abs().max()
        given = torch.tensor([max(top.values()) for top in told["top_logprobs"][1 : len(prompt)]])
        assert torch.allclose(given, best, atol=2e-4)


def test_echoed_logprobs_and_prompt_logprobs_each_list_their_number(fields_server: Server) -> None:
    choice = complete(fields_server, echo=True, logprobs=0, prompt_logprobs=3, max_tokens=1)
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:])
    assert all(len(top) in (3, 4) for top in choice["prompt_logprobs"][1:])


def test_an_echo_with_logprobs_in_a_stream_is_a_400(fields_server: Server) -> None:
    error = rejection(fields_server, COMPLETIONS, prompt="x", echo=True, logprobs=1, stream=True)
    assert error["param"] == "echo"


def test_the_stop_that_ended_an_answer_is_shown_to_those_who_ask(fields_server: Server) -> None:
    assert complete(fields_server, stop="il")["text"] == "k"
    shown = complete(fields_server, stop="il", include_stop_str_in_output=True)
    assert (shown["text"], shown["stop_reason"]) == ("kil", "il")
    by_token = complete(fields_server, stop_token_ids=[ord("l")], include_stop_str_in_output=True)
    assert (by_token["text"], by_token["stop_reason"]) == ("kil", ord("l"))


def test_special_tokens_are_shown_to_those_who_ask(fields_server: Server) -> None:
    assert complete(fields_server)["text"] == "kilo"
    assert complete(fields_server, skip_special_tokens=False)["text"] == "kilo", "the end token ends the text"
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True, "spaces_between_special_tokens": False}
    assert complete(fields_server, **shown)["text"] == "kilo<|end|>"
    going_on = complete(fields_server, ignore_eos=True, skip_special_tokens=False, max_tokens=5)
    assert going_on["text"] == "kilo<|end|>"


def prompt_of(server: Server, **fields: Any) -> list[int]:
    ids: list[int] = complete(server, max_tokens=1, return_token_ids=True, **fields)["prompt_token_ids"]
    return ids


def test_a_prompt_is_truncated_to_its_last_or_first_tokens(fields_server: Server) -> None:
    text = "0123456789"
    assert prompt_of(fields_server, prompt=text, truncate_prompt_tokens=4) == list(b"6789")
    assert prompt_of(fields_server, prompt=text, truncate_prompt_tokens=4, truncation_side="right") == list(b"0123")
    assert prompt_of(fields_server, prompt=text, truncate_prompt_tokens=11) == list(text.encode())
    assert prompt_of(fields_server, prompt=[*range(20)], truncate_prompt_tokens=3) == [17, 18, 19]
    long = [7, *[8] * CONTEXT]
    assert prompt_of(fields_server, prompt=long, truncate_prompt_tokens=-1) == long[-CONTEXT + 1 :]
    assert complete(fields_server, prompt=text, truncate_prompt_tokens=2, echo=True, max_tokens=0)["text"] == "89"
    error = rejection(fields_server, COMPLETIONS, prompt="a" * 4 * (CONTEXT + 1), truncate_prompt_tokens=1)
    assert error["code"] == "context_length_exceeded"


def test_logprobs_may_name_tokens_by_their_ids(fields_server: Server) -> None:
    told = complete(fields_server, logprobs=1, max_tokens=2, return_tokens_as_token_ids=True)["logprobs"]
    assert told["tokens"] == [f"token_id:{byte}" for byte in b"ki"]
    assert list(told["top_logprobs"][0]) == [f"token_id:{ord('k')}"]
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "max_tokens": 1}
    chat = ask(fields_server, CHAT, **body, return_tokens_as_token_ids=True)
    assert chat["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")


def rendered(server: Server, *messages: tuple[str, str], **fields: Any) -> str:
    """What the template made of a chat."""
    chat = [{"role": role, "content": content} for role, content in messages]
    answer = ask(server, CHAT, messages=chat, max_tokens=1, return_token_ids=True, **fields)
    return bytes(answer["prompt_token_ids"]).decode()


def test_the_operators_template_and_its_variables_are_used(fields_server: Server) -> None:
    assert rendered(fields_server, ("user", "hi")) == "so/usual/;user: hi.go"
    kwargs = {"enable_thinking": "never"}
    assert rendered(fields_server, ("user", "hi"), chat_template_kwargs=kwargs) == "never/usual/;user: hi.go"
    error = rejection(fields_server, CHAT, messages=[{"role": "user", "content": "x"}], chat_template="{{ 1 }}")
    assert (error["param"], error["code"]) == ("chat_template", "unsupported_value")


def test_the_template_reads_the_effort_under_its_own_names(fields_server: Server) -> None:
    assert rendered(fields_server, ("user", "hi"), reasoning_effort="low") == "True/True/low;user: hi.go"
    assert rendered(fields_server, ("user", "hi"), reasoning_effort="none") == "False/False/none;user: hi.go"
    kwargs = {"thinking": "mine"}
    asked = rendered(fields_server, ("user", "hi"), reasoning_effort="high", chat_template_kwargs=kwargs)
    assert asked == "True/mine/high;user: hi.go"


def test_the_last_message_may_be_left_open(fields_server: Server) -> None:
    turn = ("user", "hi")
    assert rendered(fields_server, turn, ("assistant", "He"), continue_final_message=True).endswith("assistant: He")
    spaced = rendered(fields_server, turn, ("assistant", "He "), continue_final_message=True)
    assert spaced.endswith("assistant: He"), "the template trims"
    assert rendered(fields_server, turn, ("assistant", "He")).endswith("assistant: He.go")
    messages = [{"role": "user", "content": "hi"}]
    error = rejection(fields_server, CHAT, messages=messages, continue_final_message=True)
    assert error["param"] == "continue_final_message"
    assert "the user's" in error["message"]


def test_a_whole_number_may_have_a_point(fields_server: Server) -> None:
    asked = {"prompt": [float(token) for token in KILO], "max_tokens": 3.0, "n": 2.0, "priority": 0.0, "logprobs": 1.0}
    choices = ask(fields_server, COMPLETIONS, **asked)["choices"]
    assert [(choice["text"], len(choice["logprobs"]["tokens"])) for choice in choices] == [("kil", 3)] * 2
    thinking = {"type": "enabled", "budget_tokens": 1024.0}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert ask(fields_server, "/v1/messages", max_tokens=3.0, thinking=thinking, **chat)["usage"]["output_tokens"] == 3
    assert rejection(fields_server, COMPLETIONS, prompt=KILO, max_tokens=3.5)["message"] == (
        "`max_tokens` is 3.5, where a whole number is allowed; send that or leave it out"
    )
