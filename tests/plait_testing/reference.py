"""SmolLM2 in transformers: the reference for the engine's tokens.

transformers takes most of a minute to read a GGUF file, so what it read is kept for the other test processes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

KEPT = Path(__file__).resolve().parents[2] / "target" / "reference"


@dataclass(frozen=True, slots=True)
class Judgement:
    """How a greedy answer compares with the reference, position by position."""

    num_tokens: int
    num_different: int
    worst_gap: float
    """By how many logits the reference prefers its own best token, at the worst position; 0 if all agree."""


class Reference:
    """De-quantised weights of one GGUF file in float32."""

    def __init__(self, gguf: Path) -> None:
        self.tokenizer = load_tokenizer(gguf)
        self.model = load_llama(gguf)

    def chat_ids(self, text: str) -> list[int]:
        """The ids of a chat of one user message, as the model's own template writes it."""
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """So many greedy tokens after the prompt; end tokens are passed over."""
        answer = self.model.generate(
            torch.tensor([prompt]), do_sample=False, min_new_tokens=num_tokens, max_new_tokens=num_tokens
        )
        ids: list[int] = answer[0, len(prompt) :].tolist()
        return ids

    @torch.inference_mode()
    def judge(self, prompt: list[int], answer: list[int]) -> Judgement:
        """Teacher-forced: the answer's own tokens are the context, so one difference does not hide the rest."""
        logits_TV = self.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
        chosen_T = logits_TV.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        gap_T = logits_TV.max(dim=1).values - chosen_T
        return Judgement(len(answer), int((gap_T > 0).sum()), float(gap_T.max()))


def load_llama(gguf: Path) -> LlamaForCausalLM:
    """A Llama as transformers reads it, in float32."""
    folder = kept(gguf, "llama", lambda made: read_llama(gguf).save_pretrained(made))
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def read_llama(gguf: Path) -> LlamaForCausalLM:
    """A Llama as transformers reads it, in float32: its own name map, permutation and configuration."""
    config = LlamaConfig(**load_gguf_checkpoint(str(gguf))["config"])
    with torch.device("meta"):
        empty = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=empty)["tensors"]
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"]  # tied
    assert not unexpected
    model.tie_weights()
    return model


@cache
def load_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """The tokenizer as transformers builds it from a file; once a session."""
    folder = kept(gguf, "tokenizer", lambda made: read_tokenizer(gguf).save_pretrained(made))
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder))
    return tokenizer


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    return tokenizer


def kept(gguf: Path, what: str, make: Callable[[Path], object]) -> Path:
    """The folder with what transformers made of a file, written by whichever process comes first."""
    state = gguf.stat()
    folder = KEPT / f"{what}-{gguf.stem}-{state.st_size}-{state.st_mtime_ns}-{transformers.__version__}"
    if not folder.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=KEPT))
        make(made)
        try:
            made.rename(folder)
        except OSError:
            shutil.rmtree(made)  # another process was first
    return folder


@cache
def load_reference(gguf: Path) -> Reference:
    """The reference for a file; loaded once a session."""
    return Reference(gguf)
