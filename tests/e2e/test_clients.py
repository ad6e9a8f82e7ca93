"""Clients that people have, unchanged: what their own helpers ask for, and what they make of the answers.

The openai SDK is a test dependency; langchain-openai and litellm are not, and their tests are skipped where they are
missing: `pip install langchain-openai 'litellm[proxy]'`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import anthropic
import httpx
import openai
import pytest
from plait_testing.running_server import Server, start_server
from pydantic import BaseModel, Field

Word = Annotated[str, Field(max_length=6, pattern="^[a-z]*$")]
MODEL = "recall-gqa"
ASK: list[Any] = [{"role": "user", "content": "copy kilo"}]
DRAWN: dict[str, Any] = {"temperature": 100, "seed": 1, "max_tokens": 600}
"""Any token that may come is as likely, so that white space ends soon."""


class Event(BaseModel):
    """What an answer must be; it comes to an end, whatever the model would write."""

    name: Word
    kind: Literal["create", "delete"]
    urgent: bool
    tags: Annotated[list[Word], Field(max_length=2)]


@pytest.fixture(scope="module")
def clients_server(check_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """recall-gqa as a model that calls tools as Hermes does."""
    flags = ["--dtype", "float32", "--max-seqs", "8", "--max-model-len", "2048", "--tool-call-parser", "hermes"]
    log = tmp_path_factory.mktemp("server") / "server.log"
    one = start_server(log, check_models / MODEL, *flags, "--enable-auto-tool-choice")
    assert one.url, one.errors
    yield one
    one.kill()


@pytest.fixture(scope="module")
def sdk(clients_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{clients_server.url}/v1", api_key="none", max_retries=0)


def streamed_usage(sdk: openai.OpenAI) -> int | None:
    asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = sdk.chat.completions.create(**CHAT, **asked)
    return last.usage.completion_tokens if last.usage else None


def num_best(sdk: openai.OpenAI) -> set[int]:
    logprobs = sdk.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2).choices[0].logprobs
    return {len(token.top_logprobs) for token in (logprobs.content or [] if logprobs else [])}


def cut(sdk: openai.OpenAI) -> tuple[str | None, str]:
    choice = sdk.chat.completions.create(**CHAT, max_completion_tokens=2).choices[0]
    return choice.message.content, choice.finish_reason


def completed(sdk: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    return sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=3, temperature=0, **fields)


def of_schema(sdk: openai.OpenAI) -> list[str]:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    answer = sdk.chat.completions.create(model=MODEL, messages=ASK, response_format=form, **DRAWN)
    return list(json.loads(answer.choices[0].message.content or ""))


def of_a_wrong_model(sdk: openai.OpenAI) -> int:
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.chat.completions.create(**CHAT | {"model": "other"})
    return caught.value.status_code


def message(sdk: openai.OpenAI) -> list[Any]:
    client = anthropic.Anthropic(base_url=str(sdk.base_url).removesuffix("/v1/"), api_key="none", max_retries=0)
    told = client.messages.create(model=MODEL, messages=ASK, max_tokens=16, extra_body={"temperature": 0})
    return [block.text for block in told.content if block.type == "text"]


CHAT: dict[str, Any] = {"model": MODEL, "messages": ASK, "temperature": 0}
CALLS: dict[str, tuple[Callable[[openai.OpenAI], Any], Any]] = {
    "models": (lambda sdk: [model.id for model in sdk.models.list()], [MODEL]),
    "one model": (lambda sdk: sdk.models.retrieve(MODEL).id, MODEL),
    "chat": (lambda sdk: sdk.chat.completions.create(**CHAT).choices[0].message.content, "kilo"),
    "streamed usage": (streamed_usage, len("kilo") + 1),
    "log-probabilities": (num_best, {2}),
    "max_completion_tokens": (cut, ("ki", "length")),
    "completions": (lambda sdk: completed(sdk, "abc").usage.completion_tokens, 3),
    "echo": (lambda sdk: completed(sdk, "abc", echo=True).choices[0].text[:3], "abc"),
    "token ids": (lambda sdk: completed(sdk, [5, 6, 7]).usage.prompt_tokens, 3),
    "n": (lambda sdk: len(completed(sdk, "abc", n=3).choices), 3),
    "prompt lists": (lambda sdk: [one.index for one in completed(sdk, ["a", "b"]).choices], [0, 1]),
    "a JSON schema": (of_schema, ["a"]),
    "a response": (lambda sdk: sdk.responses.create(model=MODEL, input=ASK, temperature=0).output_text, "kilo"),
    "a streamed response": (
        lambda sdk: [one.type for one in sdk.responses.create(model=MODEL, input=ASK, temperature=0, stream=True)][-1],
        "response.completed",
    ),
    "embeddings": (lambda sdk: len(sdk.embeddings.create(model=MODEL, input=["a", "b"]).data), 2),
    "a wrong model": (of_a_wrong_model, 404),
    "a message": (message, ["kilo"]),
}
"""Half of them fail on common local servers. LangChain's has tests of its own."""


@pytest.mark.parametrize("call", CALLS)
def test_a_common_call_is_right(sdk: openai.OpenAI, call: str) -> None:
    ask, expected = CALLS[call]
    assert ask(sdk) == expected


def test_the_sdk_parses_an_answer_into_its_class(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.parse(model=MODEL, messages=ASK, response_format=Event, **DRAWN)
    assert isinstance(answer.choices[0].message.parsed, Event)


def test_the_sdk_parses_a_stream_into_its_class(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(model=MODEL, messages=ASK, response_format=Event, **DRAWN) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    whole = sdk.chat.completions.parse(model=MODEL, messages=ASK, response_format=Event, **DRAWN)
    assert last.choices[0].message.parsed == whole.choices[0].message.parsed


class _LangChain:
    """langchain-openai's chat model."""

    def __init__(self, url: str) -> None:
        module = pytest.importorskip("langchain_openai")
        self.model = module.ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, max_retries=0, **DRAWN)


@pytest.fixture
def langchain(clients_server: Server) -> Any:
    return _LangChain(clients_server.url).model


def test_langchain_answers_whole_streamed_and_in_batches(langchain: Any) -> None:
    greedy = langchain.model_copy(update={"temperature": 0})
    assert greedy.invoke("copy kilo").content == "kilo"
    assert "".join(chunk.content for chunk in greedy.stream("copy kilo")) == "kilo"
    assert [one.content for one in greedy.batch(["copy kilo", "copy lima"])] == ["kilo", "lima"]


def test_langchain_structures_an_answer_by_a_json_schema(langchain: Any) -> None:
    structured = langchain.with_structured_output(Event, method="json_schema")
    assert isinstance(structured.invoke("an event"), Event)
    assert isinstance(list(structured.stream("an event"))[-1], Event)


class Forecast(BaseModel):
    """Weather of a place."""

    city: Word
    days: Annotated[int, Field(ge=1, le=7)]


def test_langchain_calls_a_bound_tool_whole_and_streamed(langchain: Any) -> None:
    bound = langchain.bind_tools([Forecast], tool_choice="Forecast")
    (call,) = bound.invoke("copy kilo").tool_calls
    assert call["name"] == "Forecast"
    Forecast.model_validate(call["args"])
    first, *rest = bound.stream("copy kilo")
    joined = first
    for chunk in rest:
        joined = joined + chunk
    assert [(one["name"], one["args"]) for one in joined.tool_calls] == [(call["name"], call["args"])]


def test_langchain_structures_an_answer_by_a_tool(langchain: Any) -> None:
    structured = langchain.with_structured_output(Forecast, method="function_calling")
    assert isinstance(structured.invoke("copy kilo"), Forecast)


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is fetched
    return pytest.importorskip("litellm")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_answers_whole_and_streamed_with_usage_and_a_class(
    litellm: Any, clients_server: Server, provider: str
) -> None:
    given = {"model": f"{provider}/{MODEL}", "api_base": f"{clients_server.url}/v1", "api_key": "none"}
    greedy = given | {"messages": ASK, "temperature": 0, "max_tokens": 8}
    assert litellm.completion(**greedy).choices[0].message.content == "kilo"
    chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **greedy))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "kilo"
    assert chunks[-1].usage.completion_tokens == len("kilo") + 1
    assert len(litellm.completion(n=3, **greedy).choices) == 3
    answer = litellm.completion(response_format=Event, messages=ASK, **given, **DRAWN)
    Event.model_validate_json(answer.choices[0].message.content)
    guided = litellm.completion(extra_body={"guided_regex": "[0-9]{3}"}, **greedy)
    assert guided.choices[0].message.content.isdecimal()


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_calls_a_tool_whole_and_streamed(litellm: Any, clients_server: Server, provider: str) -> None:
    tool = {"type": "function", "function": {"name": "forecast", "parameters": Forecast.model_json_schema()}}
    given = {"model": f"{provider}/{MODEL}", "api_base": f"{clients_server.url}/v1", "api_key": "none"}
    asked = given | DRAWN | {"messages": ASK, "tools": [tool], "tool_choice": "required"}
    whole = litellm.completion(**asked, parallel_tool_calls=False)
    (call,) = whole.choices[0].message.tool_calls
    assert (call.function.name, whole.choices[0].finish_reason) == ("forecast", "tool_calls")
    Forecast.model_validate_json(call.function.arguments)
    chunks = list(litellm.completion(stream=True, **asked, parallel_tool_calls=False))
    joined = litellm.stream_chunk_builder(chunks, messages=ASK)
    (streamed,) = joined.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments


OF_VLLM: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/completions", {"prompt": "copy kilo", "repetition_penalty": 1.0, "logprobs": None}),
    "openai, token ids": ("/v1/completions", {"prompt": [9] * 24, "repetition_penalty": 1.0, "logprobs": None}),
    "openai-chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "copy kilo"}]}]},
    ),
}
"""What `vllm bench serve` sends by `--backend`, beside the fields of all."""


@pytest.mark.parametrize("backend", OF_VLLM)
def test_vllm_bench_serve_reads_as_many_tokens_as_it_asked_for(clients_server: Server, backend: str) -> None:
    path, own = OF_VLLM[backend]
    length = "max_completion_tokens" if backend == "openai-chat" else "max_tokens"
    of_all = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    # Behind --temperature, --top-p and the like; each request has an id of its own.
    body = of_all | own | {length: 12, "temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0}
    num_with_choices, usage = 0, None
    with httpx.stream("POST", clients_server.url + path, json=body, headers={"x-request-id": "bench-1"}) as answer:
        assert answer.status_code == 200, answer.read()
        messages = [line.strip() for line in "".join(answer.iter_text()).split("\n\n") if line.strip()]
    assert messages.pop() == "data: [DONE]"
    for message in messages:
        data = json.loads(message.removeprefix("data: "))
        num_with_choices += bool(data["choices"])
        if not data["choices"]:
            usage = data["usage"]
    assert usage is not None
    assert (usage["completion_tokens"], usage["prompt_tokens"] > 0) == (12, True)
    assert 1 < num_with_choices <= 12 + 2


def test_a_schema_of_the_sdk_is_strict_json(sdk: openai.OpenAI) -> None:
    schema = {"name": "event", "strict": True, "schema": Event.model_json_schema() | {"additionalProperties": False}}
    asked: Any = {"type": "json_schema", "json_schema": schema}
    answer = sdk.chat.completions.create(model=MODEL, messages=ASK, response_format=asked, **DRAWN)
    Event.model_validate(json.loads(answer.choices[0].message.content or ""))
