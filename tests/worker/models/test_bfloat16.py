"""SmolLM2 in bfloat16, with its file's quantised weights (the default) and with all of them rounded, against float32.

Its two best tokens often lie under 0.1 nat apart, so text is not compared: log-probabilities are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from plait_testing.questions import QUESTIONS
from plait_testing.recording import Record
from plait_testing.reference import Reference, load_reference
from torch import Tensor

# A token that the reference finds this much worse (in nats) is a fault, not rounding.
REAL_GAP = 0.5


@pytest.mark.acceptance("cpu")
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_bfloat16_differs_from_float32_by_rounding_only(
    dtype: str, demo_gguf: Path, drive: Callable[..., Any], sized: Callable[[int, int], int], record: Record
) -> None:
    reference = load_reference(demo_gguf)
    given = drive(demo_gguf, dtype=dtype, num_pages=256)
    pairs = [compare(reference, given, question, sized(32, 64)) for question in QUESTIONS[: sized(3, 20)]]
    expected_TV, given_TV = (torch.cat(logprobs) for logprobs in zip(*pairs, strict=True))
    kl_T = (expected_TV.exp() * (expected_TV - given_TV)).sum(dim=-1)
    gap_T = expected_TV.max(dim=-1).values - expected_TV.gather(1, given_TV.argmax(-1, keepdim=True)).squeeze(1)
    case = f"SmolLM2 {dtype} against transformers float32"
    record(case, "tokens", "tokens", len(kl_T))
    record(case, "tokens_different", "tokens", int((gap_T > 0).sum()))
    record(case, "worst_logprob_gap", "nats", float(gap_T.max()), REAL_GAP)
    record(case, "kl_mean", "nats", float(kl_T.mean()))
    record(case, "kl_p99", "nats", float(kl_T.quantile(0.99)))
    record(case, "kl_max", "nats", float(kl_T.max()))
    assert gap_T.max() <= REAL_GAP
    assert kl_T.quantile(0.99) < 0.05


def compare(reference: Reference, driver: Any, question: str, output_len: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities ``[output_len, V]`` of both over the reference's own greedy answer."""
    ids, expected_TV = expect(reference, question, output_len)
    given_TV = driver.step({question: ids})[question]
    return expected_TV, given_TV[-1 - output_len : -1]


@cache
def expect(reference: Reference, question: str, output_len: int) -> tuple[list[int], Tensor]:
    """The question with the reference's greedy answer, and its log-probabilities over that: the same for each type."""
    prompt = reference.chat_ids(question)
    ids = prompt + reference.greedy(prompt, output_len)
    with torch.inference_mode():
        logprobs_TV = reference.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return ids, logprobs_TV[-1 - output_len : -1]
