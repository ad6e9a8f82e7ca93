"""A folder like MiniMax-M2's is served: its configuration, its experts' tensor names, a template like its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest
import torch
import transformers
from plait_testing.running_server import StartServer
from safetensors import safe_open

SIZES = {
    "vocab_size": 264,
    "hidden_size": 48,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
# What M2's own template does: text that is a string or a list of parts, thoughts left out before the last question,
# no tools here, and an answer that begins with a thought.
TEMPLATE = """
{%- macro visible(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for part in content -%}{%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set seen = namespace(last_user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set seen.last_user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{{- '<|bos|><|system|>' -}}
{%- if messages[0].role == 'system' -%}{{ visible(messages[0].content) }}{%- else -%}{{ 'You help.' }}{%- endif -%}
{%- if tools -%}
    {%- for tool in tools -%}{{ '\\n<tool>' ~ tool.function | tojson(ensure_ascii=False) ~ '</tool>' }}{%- endfor -%}
{%- endif -%}
{%- for m in messages if m.role != 'system' -%}
    {%- if m.role == 'user' -%}{{ '<|user|>' ~ visible(m.content) }}
    {%- elif m.role == 'assistant' -%}
        {%- set text = visible(m.content) -%}
        {%- if '</think>' in text and loop.index0 < seen.last_user -%}
            {%- set text = text.split('</think>')[-1].strip('\\n') -%}
        {%- endif -%}
        {{ '<|assistant|>' ~ text ~ '<|end|>' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|><think>\\n' }}{%- endif -%}
"""
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "one é"}]},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo"},
    {"role": "user", "content": "three"},
]


@pytest.fixture
def folder(tmp_path: Path, check_models: Path) -> Path:
    """A small random MiniMax-M2 with a byte tokenizer; norms and the router's biases are random too."""
    torch.manual_seed(0)
    config = transformers.MiniMaxM2Config(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, values in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name:
            torch.nn.init.uniform_(values, 0.5, 1.5)
        elif name.endswith("e_score_correction_bias"):
            torch.nn.init.uniform_(values, -0.5, 0.5)
    path = tmp_path / "minimax-m2"
    model.save_pretrained(path)
    shutil.copyfile(check_models / "recall-gqa" / "tokenizer.json", path / "tokenizer.json")
    settings = json.loads((check_models / "recall-gqa" / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return path


def test_a_minimax_folder_answers_as_transformers_does(folder: Path, server: StartServer) -> None:
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert any(".block_sparse_moe.experts.7.w2." in name for name in file.keys())  # noqa: SIM118
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = reference.generate(torch.tensor([prompt["input_ids"]]), do_sample=False, max_new_tokens=24)
    running = server(folder, "--dtype", "float32", "--threads", "2")
    assert running.url, running.errors
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    assert answer["prompt_token_ids"] == prompt["input_ids"]
    assert answer["choices"][0]["token_ids"] == expected[0, len(prompt["input_ids"]) :].tolist()
