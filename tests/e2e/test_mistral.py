"""A folder like Mistral's is served, with a prompt several times as long as its sliding window."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest
import torch
import transformers
from plait_testing.running_server import StartServer

WINDOW = 24
SIZES = {
    "vocab_size": 264,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
MESSAGES = [{"role": "user", "content": "What lies further back than the window is not seen. " * 3}]


@pytest.fixture
def folder(tmp_path: Path, check_models: Path) -> Path:
    """A small random Mistral with a byte tokenizer."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.MistralConfig(**SIZES), dtype=torch.float32)
    path = tmp_path / "mistral"
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(check_models / "recall-gqa" / name, path / name)
    return path


def test_a_mistral_folder_answers_as_transformers_does(folder: Path, server: StartServer) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)
    assert len(prompt["input_ids"]) > 5 * WINDOW
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = reference.generate(torch.tensor([prompt["input_ids"]]), do_sample=False, max_new_tokens=40)
    running = server(folder, "--dtype", "float32", "--threads", "2", "--max-batch-tokens", "50")
    assert running.url, running.errors
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40, "return_token_ids": True}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    assert answer["prompt_token_ids"] == prompt["input_ids"]
    assert answer["choices"][0]["token_ids"] == expected[0, len(prompt["input_ids"]) :].tolist()
