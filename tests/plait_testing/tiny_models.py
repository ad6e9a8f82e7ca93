"""Random models of a few thousand weights, written as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from plait_proto import WorkerConfig
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 300


def save_tiny_llama(folder: Path) -> LlamaForCausalLM:
    """A Llama of two layers in float32, wide enough in its weights that its tokens vary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def config_for(model: Path, run_dir: Path, /, **changes: object) -> WorkerConfig:
    """What the engine's side writes for one rank of this model; ``changes`` may name fields of the nested structs."""
    nested: dict[str, dict[str, object]] = {
        "device": {"device": "cpu", "cuda_graphs": True, "cuda_graph_max_bs": 8, "custom_all_reduce": True},
        "attention": {"attention_backend": "auto", "mla_context_chunk_size": 64},
        "kv_cache": {"kv_cache_dtype": "auto", "k_scale": None, "v_scale": None},
        "parallel": {"world": 1, "dp": 1, "dp_attention": False},
        "pages": {"page_size": 16, "num_pages": None, "memory_fraction": None},
    }
    for fields in nested.values():
        fields.update({name: changes.pop(name) for name in fields.keys() & changes.keys() if name != "dtype"})
    settings: dict[str, object] = {
        "model": str(model),
        "run_dir": str(run_dir),
        "load_format": "auto",
        "dtype": "float32",
        "quantization": "auto",
        "max_model_len": 512,
        "max_batch_tokens": 2048,
        "max_seqs": 8,
        "draft_tokens": 0,
        "threads": 1,
        "log_level": "info",
    }
    return msgspec.convert({**settings, **nested, **changes}, WorkerConfig)
