"""Embeddings: transformers' hidden states, pooled, from any batch and chunk, over HTTP and without."""

import base64
import shutil
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from plait import LLM, SamplingParams
from plait.offline.prompts import Prompt
from plait_testing.running_server import Server
from transformers import Qwen3Config, Qwen3ForCausalLM

CLOSE = 1e-4
SPOILT = 99
"""A token whose embedding is NaN."""
PROMPTS = [[(7 * index + 3 * place) % 97 for place in range(1 + 9 * index)] for index in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, check_models: Path) -> tuple[Path, Qwen3ForCausalLM]:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    reference = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        reference.model.embed_tokens.weight[SPOILT] = float("nan")
    folder = tmp_path_factory.mktemp("qwen3")
    reference.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(check_models / "recall-gqa" / name, folder)
    return folder, reference


@pytest.fixture(scope="module", params=["last", "mean"])
def pooling(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture(scope="module")
def llm(model: tuple[Path, Qwen3ForCausalLM], pooling: str) -> Iterator[LLM]:
    """Pages of 4 tokens and chunks of 5; the mean over two ranks."""
    sizes = {"page_size": 4, "num_pages": 400, "max_seqs": 4, "max_batch_tokens": 16, "long_prefill": 5}
    with LLM(model[0], dtype="float32", threads=1, pooling=pooling, tp=2 if pooling == "mean" else 1, **sizes) as one:
        yield one


def expected(reference: Qwen3ForCausalLM, pooling: str, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        hidden_TD = reference.model(torch.tensor([prompt])).last_hidden_state[0]
    pooled_D = hidden_TD[-1] if pooling == "last" else hidden_TD.mean(0)
    unit_D: torch.Tensor = pooled_D / pooled_D.norm()
    return unit_D


def embeddings(llm: LLM, prompts: list[list[int]], **options: Any) -> list[torch.Tensor]:
    asked: list[Prompt] = list(prompts)
    outputs = [output.outputs for output in llm.embed(asked, **options)]
    return [torch.tensor(output.embedding) for output in outputs if output is not None]


def test_vectors_are_transformers_pooled_hidden_states(
    llm: LLM, model: tuple[Path, Qwen3ForCausalLM], pooling: str
) -> None:
    told = embeddings(llm, PROMPTS)
    for prompt, vector in zip(PROMPTS, told, strict=True):
        assert torch.allclose(vector, expected(model[1], pooling, prompt), atol=CLOSE)


def test_vectors_are_the_same_beside_generation_alone_and_where_others_left_the_pages(
    llm: LLM, model: tuple[Path, Qwen3ForCausalLM], pooling: str
) -> None:
    answers = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts: list[Prompt] = list(PROMPTS)
    alone = [output.outputs[0].token_ids for output in llm.generate(prompts, answers)]
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(llm.generate, prompts, answers)
        told = [pool.submit(embeddings, llm, PROMPTS).result() for _ in range(3)]
    assert [output.outputs[0].token_ids for output in beside.result()] == alone
    for vectors in (*told, [embeddings(llm, [prompt])[0] for prompt in PROMPTS]):
        for prompt, vector in zip(PROMPTS, vectors, strict=True):
            assert torch.allclose(vector, expected(model[1], pooling, prompt), atol=CLOSE)


def test_fewer_dimensions_are_the_first_ones_at_length_one(
    llm: LLM, model: tuple[Path, Qwen3ForCausalLM], pooling: str
) -> None:
    whole = expected(model[1], pooling, PROMPTS[3])
    [vector] = embeddings(llm, [PROMPTS[3]], dimensions=10)
    assert torch.allclose(vector, whole[:10] / whole[:10].norm(), atol=CLOSE)
    [refused] = llm.embed([PROMPTS[3]], dimensions=65)
    assert refused.error is not None
    assert refused.error.message == "`dimensions` is 65, where 1 to 64 are allowed; send that or leave it out"


def test_a_vector_of_nan_is_an_error_and_others_are_not(llm: LLM) -> None:
    prompts: list[Prompt] = [PROMPTS[2], [1, SPOILT, 2], PROMPTS[4]]
    good, spoilt, other = llm.embed(prompts)
    assert spoilt.error is not None
    assert (spoilt.error.status, spoilt.error.code) == (500, "not_finite")
    assert good.error is other.error is None


def test_openais_client_gets_the_same_in_both_encodings(recall_server: Server) -> None:
    client = openai.OpenAI(base_url=f"{recall_server.url}/v1", api_key="none")
    texts = ["the sea", "the sky"]
    packed = client.embeddings.create(model="recall-gqa", input=texts)
    told = client.embeddings.create(model="recall-gqa", input=texts, encoding_format="float")
    assert [item.index for item in packed.data] == [0, 1]
    for one, other in zip(packed.data, told.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding)
        assert sum(element**2 for element in one.embedding) == pytest.approx(1, abs=1e-5)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == len("the sea") + len("the sky")
    body = {"input": [256, 116], "encoding_format": "base64"}
    answer = httpx.post(f"{recall_server.url}/v1/embeddings", json=body).json()
    raw = base64.b64decode(answer["data"][0]["embedding"], validate=True)
    assert sum(element**2 for element in struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", "`input` is missing; send it"),
        ({"input": []}, "input", "`input` is empty; send at least one text"),
        ({"input": ["a"] * 2049}, "input", "`input` has 2049 prompts, where 1 to 2048 are allowed"),
        (
            {"input": "a", "encoding_format": "int8"},
            "encoding_format",
            '`encoding_format` is "int8", where one of float',
        ),
        ({"input": "a", "dimensions": 0}, "dimensions", "`dimensions` is 0, where 1 to"),
        ({"input": ["a", "x" * 20_000]}, "input[1]", "`input[1]` has more tokens than"),
        ({"input": [1 << 40]}, "input", "`input` "),
        ({"input": [1, "a"]}, "input", "`input` mixes token ids with other prompts"),
        ({"input": "a", "normalize": False}, "normalize", "`normalize` is false: this server does not have"),
    ],
)
def test_a_wrong_field_is_named(recall_server: Server, body: dict[str, Any], param: str, said: str) -> None:
    answer = httpx.post(f"{recall_server.url}/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(said), error["message"]


def test_two_thousand_inputs_of_one_call_have_their_vectors(recall_server: Server) -> None:
    body = {"input": [[116, 104 + index % 7] for index in range(2048)], "encoding_format": "base64"}
    answer = httpx.post(f"{recall_server.url}/v1/embeddings", json=body, timeout=120).json()
    vectors = [item["embedding"] for item in answer["data"]]
    assert [item["index"] for item in answer["data"]] == list(range(2048))
    assert len(set(vectors[:7])) == 7
