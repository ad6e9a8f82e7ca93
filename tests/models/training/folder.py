"""A check model's folder: safetensors, configuration, and a tokenizer whose tokens are bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models import recall_tasks as tasks
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

SPECIALS = ("<|bos|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|unused0|>", "<|unused1|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}<|system|>{{ m.content }}"
    "{% elif m.role == 'user' %}<|user|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save(tensors: dict[str, Tensor], config: dict[str, Any], out: Path) -> None:
    """Write the folder."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().save(str(out / "tokenizer.json"))
    ids = {"bos_token_id": tasks.BOS, "eos_token_id": tasks.EOS, "pad_token_id": tasks.PAD}
    write(out / "config.json", config)
    write(out / "generation_config.json", ids | {"do_sample": False})
    write(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|end|>",
            "pad_token": "<|pad|>",
            "model_max_length": 8192,
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        },
    )


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))


def byte_tokenizer() -> Tokenizer:
    """Token ids are byte values, spelled in GPT-2's alphabet of bytes; then the specials."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {byte: byte for byte in printable}
    spelled |= {byte: 256 + i for i, byte in enumerate(byte for byte in range(256) if byte not in spelled)}
    tokenizer = Tokenizer(models.BPE({chr(code): byte for byte, code in spelled.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    if [tokenizer.token_to_id(name) for name in SPECIALS] != list(range(256, tasks.VOCAB)):
        raise ValueError("the specials do not follow the bytes")
    return tokenizer
