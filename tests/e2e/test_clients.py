"""Clients that people have, unchanged: what their own helpers ask for, and what they make of the answers.

The openai SDK is a test dependency; langchain-openai and litellm are not, and their tests are skipped where they are
missing: `pip install langchain-openai 'litellm[proxy]'`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

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


def test_a_schema_of_the_sdk_is_strict_json(sdk: openai.OpenAI) -> None:
    schema = {"name": "event", "strict": True, "schema": Event.model_json_schema() | {"additionalProperties": False}}
    asked: Any = {"type": "json_schema", "json_schema": schema}
    answer = sdk.chat.completions.create(model=MODEL, messages=ASK, response_format=asked, **DRAWN)
    Event.model_validate(json.loads(answer.choices[0].message.content or ""))
