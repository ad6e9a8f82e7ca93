"""Small GGUF files, written by the library that everybody uses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from plait_testing.gguf_blocks import random_blocks

Kind = gguf.GGMLQuantizationType
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}


@pytest.fixture
def tiny_llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a llama's query or key as converters to GGUF order them."""
    return weight.reshape(num_heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def gguf_name(name: str) -> str:
    """A parameter's name in a GGUF."""
    stem, _, ending = name.rpartition(".")
    if ending not in ("weight", "bias"):
        stem, ending = name, "weight"
    if not stem.startswith("model.layers."):
        return f"{GGUF_NAMES[stem]}.{ending}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{ending}"


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write a model of transformers as a GGUF of the given architecture, with changed or additional metadata.

    ``kind`` of its matrices, or what gives each tensor's by its name in the file.
    """

    def write(
        model: Any,
        arch: str = "llama",
        kind: Kind | Callable[[str], Kind] = Kind.F32,
        extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    ) -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, arch)
        config = model.config
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        if arch != "qwen2":  # its heads follow from the hidden size
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
        writer.add_token_list([b"token %d" % i for i in range(config.vocab_size)])
        writer.add_array("tokenizer.ggml.token_type", list(range(config.vocab_size)))
        extra(writer)
        for name, parameter in model.named_parameters():
            stored_as = gguf_name(name)
            own = stored_kind(kind, stored_as, parameter.ndim)
            add_tensor(writer, stored_as, parameter.detach().numpy(), config, arch, own)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def stored_kind(kind: Kind | Callable[[str], Kind], name: str, num_dimensions: int) -> Kind:
    if not isinstance(kind, Kind):
        return kind(name)
    return kind if num_dimensions > 1 else Kind.F32


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, config: Any, arch: str, kind: Kind) -> None:
    if "ffn_gate_up_exps" in name:
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            add_tensor(writer, name.replace("gate_up", part), np.ascontiguousarray(half), config, arch, kind)
        return
    if arch == "llama" and (".attn_q." in name or ".attn_k." in name):
        values = interleaved(values, config.num_attention_heads if "attn_q" in name else config.num_key_value_heads)
    writer.add_tensor(name, stored_values(values, kind), raw_dtype=kind)


def stored_values(values: np.ndarray, kind: Kind) -> np.ndarray:
    """In the file's type; the library makes no K-quants, whose values are random instead."""
    if kind == Kind.F32:
        return values
    if kind in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
        return (
            random_blocks(kind.name, values.size // values.shape[-1], values.shape[-1])
            .raw.numpy()
            .reshape(*values.shape[:-1], -1)
        )
    return gguf.quants.quantize(values, kind)
