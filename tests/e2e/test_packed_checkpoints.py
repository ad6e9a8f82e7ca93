"""Checkpoints of 4 and 8 bits are served: greedy tokens are those of the de-quantised model."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
import transformers
from plait_testing import recall
from plait_testing.packed_models import FORMS, dense_twin, state_in_modelopts_file, write_packed
from plait_testing.running_server import Server, StartServer

NUM_TOKENS = 16
SERVED = {
    "AWQ": ("recall-gqa", "awq", "kept in blocks of Q5_0", ()),
    "GPTQ on two ranks": ("recall-gqa", "gptq", "kept in blocks of Q4_0", ("--tp", "2")),
    "MXFP4": ("recall-gqa", "mxfp4", "kept in blocks of Q5_0", ()),
    "ModelOpt's NVFP4": ("recall-gqa", "nvfp4-modelopt", "NVFP4, upcast to bfloat16", ()),
    "compressed-tensors of an MLA model": ("recall-mla", "compressed-zeros", "kept in blocks of Q5_0", ()),
}


@pytest.mark.parametrize("case", SERVED)
def test_a_packed_checkpoint_answers_as_its_dequantised_model(
    case: str, check_models: Path, tmp_path: Path, server: StartServer
) -> None:
    model, form, said, flags = SERVED[case]
    folder = tmp_path / form
    write_packed(check_models / model, folder, FORMS[form], 64)
    if case.startswith("ModelOpt"):
        state_in_modelopts_file(folder)
    running = server(folder, "--threads", "1", "--max-model-len", "1024", *flags)
    assert running.url, running.errors
    if torch.cpu._is_avx512_bf16_supported():
        assert said in running.errors
    reference = transformers.AutoModelForCausalLM.from_pretrained(dense_twin(folder), dtype=torch.float32).eval()
    for problem in recall.problems(5, 3, 400):
        prompt, given = greedy(running, problem)
        expected = reference.generate(
            torch.tensor([prompt]), do_sample=False, min_new_tokens=NUM_TOKENS, max_new_tokens=NUM_TOKENS
        )
        assert given == expected[0, len(prompt) :].tolist()


def greedy(running: Server, problem: recall.Problem) -> tuple[list[int], list[int]]:
    """The prompt's tokens and the answer's."""
    body = {
        "messages": problem["messages"],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "min_tokens": NUM_TOKENS,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    return answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
