"""Whose mistake a wrong answer is: the model's, if transformers gives it too; else the engine's."""

from __future__ import annotations

from pathlib import Path

import torch

from plait_testing.recall import Problem, Wrong
from plait_testing.recording import Record


def mistakes_of_the_engine(model: Path, asked: list[Problem], wrong: list[Wrong]) -> list[Wrong]:
    """The wrong answers that transformers, in float32 and greedy, does not give to the same problem.

    The model is loaded only if an answer is wrong.
    """
    if not wrong:
        return []
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers: dict[int, str] = {}
    for index in {one.index for one in wrong}:
        messages = asked[index]["messages"]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            answer = reference.generate(ids["input_ids"], do_sample=False, max_new_tokens=400)
        answers[index] = tokenizer.decode(answer[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return [one for one in wrong if one.given != answers[one.index]]


def record_answers(model: Path, case: str, asked: list[Problem], wrong: list[Wrong], record: Record) -> list[Wrong]:
    """Record how many answers are right; return the engine's mistakes."""
    mistakes = mistakes_of_the_engine(model, asked, wrong)
    record(case, "problems_right", "problems", len(asked) - len(wrong), len(asked))
    record(case, "mistakes_of_the_engine", "problems", len(mistakes), 0)
    return mistakes
