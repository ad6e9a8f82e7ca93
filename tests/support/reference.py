"""SmolLM2 in transformers: what the engine's tokens are judged by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Judgement:
    """How a greedy answer compares with the reference, position by position."""

    num_tokens: int
    num_different: int
    worst_gap: float
    """How much better (in logits) the reference finds its own best token, at the worst position; 0 where all agree."""


class Reference:
    """De-quantised weights of one GGUF file in float32."""

    def __init__(self, gguf: Path) -> None:
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**where)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()

    def chat_ids(self, text: str) -> list[int]:
        """The ids of a chat of one user message, as the model's own template writes it."""
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids

    @torch.inference_mode()
    def judge(self, prompt: list[int], answer: list[int]) -> Judgement:
        """Teacher-forced: the answer's own tokens are the context, so one difference does not hide the rest."""
        logits_TV = self.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
        chosen_T = logits_TV.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        gap_T = logits_TV.max(dim=1).values - chosen_T
        return Judgement(len(answer), int((gap_T > 0).sum()), float(gap_T.max()))


@cache
def load_reference(gguf: Path) -> Reference:
    """The reference for a file; loaded once a session."""
    return Reference(gguf)
