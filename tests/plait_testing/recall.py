"""Problems whose answers a program checks, asked of a running server."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

import httpx
from models import recall_tasks as tasks
from models.recall_tasks import Problem as Problem


@dataclass(frozen=True, slots=True)
class Wrong:
    """An answer that differs from the right one."""

    index: int
    kind: str
    expected: str
    given: str


def problems(seed: int, num: int, context: int) -> list[Problem]:
    """`num` problems whose dialogues stay under `context` tokens."""
    return tasks.problems(seed, num, context)


def about_one_table(seed: int, num: int, context: int) -> list[Problem]:
    """`num` questions about one table that fills most of `context` tokens: their prompts begin alike."""
    r = random.Random(f"shared-{seed}")
    table = tasks.table(r, tasks.max_keys(context))
    system = {"role": "system", "content": tasks.as_text(table)}
    asked: list[Problem] = []
    while len(asked) < num:
        question, answer, kind = tasks.question(r, table)
        if kind == "lookup":
            messages = [system, {"role": "user", "content": question}]
            asked.append({"messages": messages, "answer": answer, "kind": kind})
    return asked


def num_bytes(problem: Problem) -> int:
    """Bytes of the whole dialogue, which are its tokens but for a few specials."""
    return len("".join([problem["answer"], *(message["content"] for message in problem["messages"])]).encode())


def longest_in_pages(asked: list[Problem], page_size: int) -> int:
    """Pages that just hold the longest dialogue."""
    return -(-(max(map(num_bytes, asked)) + 8) // page_size)


def constraint(index: int, problem: Problem) -> dict[str, object]:
    """Of every other request: the right answer among wrong ones, or a regular expression that it matches."""
    if index % 2 == 0:
        return {}
    answer = problem["answer"]
    if index % 4 == 1:
        return {"structured_outputs": {"choice": [answer, "zzz", answer[:1] + "!"]}}
    return {"structured_outputs": {"regex": f"(.|\n)*{re.escape(answer[-1])}"}}


def unconstrained(_index: int, _problem: Problem) -> dict[str, object]:
    return {}


def ask_all(
    url: str,
    asked: list[Problem],
    *,
    model: str = "recall-gqa",
    concurrency: int = 8,
    own: Callable[[int, Problem], dict[str, object]] = unconstrained,
    **sampling: object,
) -> list[Wrong]:
    """Ask every problem over HTTP, `concurrency` at a time, greedily unless told; the answers that are wrong.

    `own` are further fields of each request.
    """
    with httpx.Client(base_url=url, timeout=1200) as client, ThreadPoolExecutor(concurrency) as pool:
        fields = [sampling | own(index, problem) for index, problem in enumerate(asked)]
        answers = list(pool.map(lambda problem, more: ask(client, problem, model, **more), asked, fields))
    return [
        Wrong(index, problem["kind"], problem["answer"], answer)
        for index, (problem, answer) in enumerate(zip(asked, answers, strict=True))
        if answer != problem["answer"]
    ]


@contextmanager
def writers(url: str, num_writers: int, num_tokens: int, model: str = "recall-gqa") -> Iterator[None]:
    """So many streams at any time that write `num_tokens` each and outgrow a small pool.

    In the end they hang up in the middle of what they read.
    """
    over = Event()

    def keep_writing() -> None:
        body = {
            "model": model,
            "prompt": "count 1 9",
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.Client(base_url=url, timeout=1200) as client:
            while not over.is_set():
                with client.stream("POST", "/v1/completions", json=body) as response:
                    response.raise_for_status()
                    next((chunk for chunk in response.iter_raw() if over.is_set()), None)

    with ThreadPoolExecutor(max(num_writers, 1)) as pool:
        writing = [pool.submit(keep_writing) for _ in range(num_writers)]
        try:
            yield
        finally:
            over.set()
        for each in writing:
            each.result()


def ask(client: httpx.Client, problem: Problem, model: str = "recall-gqa", **sampling: object) -> str:
    """The model's answer, the wrong one if there are several and some are wrong, or the server's error."""
    body = {"model": model, "messages": problem["messages"], "temperature": 0, "max_tokens": 400, **sampling}
    response = client.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        return f"HTTP {response.status_code}: {response.text}"
    answers: list[str] = [choice["message"]["content"] for choice in response.json()["choices"]]
    assert len(answers) == sampling.get("n", 1)
    return next((answer for answer in answers if answer != problem["answer"]), problem["answer"])
