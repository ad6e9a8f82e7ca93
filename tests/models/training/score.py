"""Score a check model on held-out problems with transformers.

python tests/models/training/score.py FOLDER [NUM [BUDGET]]
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from models import recall_tasks as tasks
from transformers import AutoModelForCausalLM, AutoTokenizer


def answer(model: Any, tokenizer: Any, problem: tasks.Problem) -> tuple[str, list[float]]:
    """The greedy answer, and the distance of the two best logits at each of its tokens."""
    prompt = tokenizer.apply_chat_template(
        problem["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"].to(model.device)
    with torch.no_grad():
        made = model.generate(
            prompt, max_new_tokens=256, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    best = [logits[0].float().topk(2).values for logits in made.logits]
    text: str = tokenizer.decode(made.sequences[0, prompt.shape[1] :], skip_special_tokens=True)
    return text, [float(first - second) for first, second in best]


def main(folder: str, num: int = 160, budget: int = 2048) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    right, asked, gaps = Counter[str](), Counter[str](), list[float]()
    for problem in tasks.problems(7, num, budget):
        text, distances = answer(model, tokenizer, problem)
        gaps += distances
        asked[problem["kind"]] += 1
        right[problem["kind"]] += text == problem["answer"]
        if text != problem["answer"]:
            print(f"{problem['messages'][-1]['content']!r}: {text!r}, not {problem['answer']!r}")
    gaps.sort()
    print({kind: f"{right[kind]}/{asked[kind]}" for kind in asked}, f"{right.total()}/{num}")
    print("distance of the two best logits, p1, p10, p50:", *(gaps[len(gaps) * p // 100] for p in (1, 10, 50)))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
