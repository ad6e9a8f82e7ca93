"""Random DeepSeek-V4 models that a server can load, and what it is asked."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from plait_testing.deepseek_v4 import random_v4
from plait_testing.running_server import Server

BYTES = 256
"""Ids of the tokenizer that stand for a byte."""
NUM_OUTPUT = 12
GAP = 1e-3
"""Logits of transformers that lie closer may be ordered either way."""
TESTS = Path(__file__).parents[1]


class Model:
    """A folder, and transformers' model of it."""

    def __init__(self, folder: Path, tokenizer: Path, **changes: Any) -> None:
        self.path = folder
        self.reference = random_v4("mixed", vocab_size=264, bos_token_id=256, eos_token_id=257, **changes)
        self.reference.save_pretrained(folder)
        shutil.copyfile(tokenizer / "tokenizer.json", folder / "tokenizer.json")
        config = json.loads((tokenizer / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        self._gaps: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def check(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        """Each token is the best behind those before it, but for ties; the largest gap to the best."""
        asked = tuple(prompt), tuple(output)
        if asked not in self._gaps:
            self._gaps[asked] = self._largest_gap(prompt, output)
        assert self._gaps[asked] < GAP, f"a prompt of {len(prompt)} tokens"
        return self._gaps[asked]

    def _largest_gap(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        with torch.no_grad():
            logits_TV = self.reference(torch.tensor([[*prompt, *output]]), use_cache=False).logits[
                0, len(prompt) - 1 : -1
            ]
        gaps = logits_TV.max(dim=-1).values - logits_TV.gather(1, torch.tensor(output)[:, None])[:, 0]
        return float(gaps.max())


def some_ids(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(BYTES), k=length)


def ask(server: Server, prompt: Sequence[int], max_tokens: int = NUM_OUTPUT) -> Any:
    body = {"prompt": list(prompt), "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def output_of(answer: Any) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def num_cached(answer: Any) -> int:
    details = answer["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


def poison_caches(patch: pytest.MonkeyPatch, counts: Path) -> None:
    """Servers started from now on check each step over poisoned caches; each rank counts them in ``counts``."""
    folders = (str(TESTS / "plait_testing" / "poisoned"), str(TESTS), os.environ.get("PYTHONPATH", ""))
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    patch.setenv("PLAIT_TEST_POISONED", str(counts))
