"""Random calls for the scheduler's model and the core, whose answers must be equal."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from plait.settings import PageSettings, Policy, SchedulerSettings

from plait_testing.late_mask_model import mask_ready
from plait_testing.scheduler_model import Scheduler
from plait_testing.scheduler_state import Ask, Plan, Row, Settings

ROOT = Path(__file__).parents[2]
REPLAY = ("--locked", "--quiet", "-p", "plait-core", "--example", "replay")
NUM_TOKENS = 61
"""Tokens of the vocabulary."""
Answer = Any
"""What a call returned, as JSON."""


@dataclass(frozen=True)
class Case:
    """Calls, and what the model answers to each."""

    seed: int
    settings: Settings
    calls: list[Any]
    answers: list[Answer]

    def line(self) -> str:
        """The case as the core's example reads it."""
        fields = {
            "scheduler": msgspec.to_builtins(self.settings.scheduler),
            "pages": msgspec.to_builtins(self.settings.pages),
            "num_pages": self.settings.num_pages,
            "max_model_len": self.settings.max_model_len,
            "max_rows": self.settings.max_rows,
            "calls": self.calls,
        }
        return json.dumps(fields)


def any_settings(drawn: random.Random, share_text: bool) -> Settings:
    """Pools of a few pages, where nearly every case preempts, to pools where none does.

    Where prompts share a text, plans are small, so that urgent requests pass others within it.
    """
    policy: Policy = drawn.choice(["fcfs", "priority", "fair", "priority" if share_text else "fair", "cache-aware"])
    scheduler = SchedulerSettings(
        max_batch_tokens=drawn.randint(1, 6 if share_text else 40),
        max_seqs=drawn.randint(1, 8),
        long_prefill_token_threshold=drawn.randint(1, 30),
        mixed=drawn.random() < 0.7,
        policy=policy,
        prefill_starvation_steps=drawn.randint(1, 5),
        max_queue=drawn.randint(4, 12),
        max_queue_tokens=200,
        max_queue_seconds=drawn.choice([None, None, 60e-6]),
        max_skip_ahead=drawn.randrange(3),
        priority_preemption_threshold=drawn.choice([None, 1, 2]) if policy == "priority" else None,
        priority_aging_seconds=drawn.choice([60.0, 20e-6]),
    )
    pages = PageSettings(
        page_size=drawn.randint(1, 3 if share_text else 6),
        prefix_cache=drawn.random() < 0.7,
        watermark=drawn.choice([None, 0, 1]),
    )
    return Settings(
        scheduler,
        pages,
        num_pages=drawn.randint(2, 14),
        max_model_len=drawn.randint(12, 60),
        max_rows=drawn.randint(1, 8),
    )


def any_ask(drawn: random.Random, share_text: bool) -> Ask:
    """Its prompt is short, long, or begins like one of two texts, or like one if all are to share it."""
    kind = 2 if share_text else drawn.randrange(3)
    if kind == 2:
        text = 0 if share_text else drawn.randrange(2)
        begin = [(i * 5 + text) % NUM_TOKENS for i in range(drawn.randint(1, 40))]
        prompt = begin + drawn.choices(range(NUM_TOKENS), k=drawn.randint(0, 4))
    else:
        prompt = drawn.choices(range(NUM_TOKENS), k=drawn.randint(1, (8, 40)[kind]))
    return Ask(
        tuple(prompt),
        max_tokens=drawn.randint(1, 24) if drawn.random() < 0.9 else 0,
        stop_ids=tuple(drawn.choices(range(NUM_TOKENS), k=drawn.randint(0, 3))),
        priority=drawn.randint(-1, 1),
        tenant=drawn.randrange(3),
        weight=drawn.randint(1, 3),
        salt=int(drawn.random() < 0.1),
        num_choices=drawn.choice([1, 1, 1, 1, 1, 2, 4]),
        is_masked=drawn.random() < 0.25,
    )


class Recorder:
    """Calls a model, and writes down calls and answers."""

    def __init__(self, seed: int) -> None:
        self.drawn = random.Random(seed)
        self.share_text = self.drawn.random() < 0.2
        self.settings = any_settings(self.drawn, self.share_text)
        self.model = Scheduler(self.settings)
        self.depth = self.drawn.randint(1, 3)
        self.case = Case(seed, self.settings, [], [])
        self.late_masks: list[int] = []
        """Requests whose mask is late."""
        self.has_mask: set[int] = set()
        """Requests whose late mask has come, until they sample."""

    def record(self) -> Case:
        for _ in range(self.drawn.randint(1, 120)):
            self._act(
                self.drawn.choices(("submit", "plan", "complete", "mask", "abort", "stop"), (8, 24, 14, 4, 1, 1))[0]
            )
        while not self.model.is_idle():
            while len(self.model.in_flight) < self.depth and self._plan():
                pass
            has_more = self._mask_ready()
            if self.model.in_flight:
                self._complete()
            else:
                assert has_more or self.model.is_idle(), f"seed {self.case.seed}: the model is stuck"
        return self.case

    def _act(self, action: str) -> None:
        requests, self.model.now = self.model.requests, len(self.case.calls) + 1
        if action == "submit":
            ask = any_ask(self.drawn, self.share_text)
            self._add({"submit": vars(ask)}, self.model.submit(ask))
        elif action == "plan" and len(self.model.in_flight) < self.depth:
            self._plan()
        elif action == "complete" and self.model.in_flight:
            self._complete()
        elif action == "mask":
            self._mask_ready()
        elif action in ("abort", "stop") and requests:
            number = self.drawn.randrange(len(requests))
            self._add({action: number}, [list(it) for it in self.model.end(number, action.capitalize())])

    def _plan(self) -> bool:
        self.model.now = len(self.case.calls) + 1
        plan = self.model.plan()
        self._add("plan", None if plan is None else shown(plan))
        return plan is not None

    def _complete(self) -> None:
        step = self.model.in_flight[0]
        rows = [row for row in step.rows if row.samples]
        tokens: list[int | None] = [(step.step * 31 + row * 17) % NUM_TOKENS for row in range(len(rows))]
        left_out = [index for index, row in enumerate(rows) if self._is_left_out(row)]
        for index in left_out:
            tokens[index] = None
        self._add({"complete": left_out}, [list(it) for it in self.model.complete(tokens)])

    def _is_left_out(self, row: Row) -> bool:
        request = row.request
        if row.is_void or request.id in self.late_masks:
            return True
        is_late = request.ask.is_masked and request.id not in self.has_mask and self.drawn.random() < 0.3
        self.has_mask.discard(request.id)
        if is_late:
            self.late_masks.append(request.id)
        return is_late

    def _mask_ready(self) -> bool:
        """One of the masks comes that are late, if there is one."""
        if not self.late_masks:
            return False
        number = self.late_masks.pop(self.drawn.randrange(len(self.late_masks)))
        self.has_mask.add(number)
        mask_ready(self.model.requests[number], self.model.decoders)
        self._add({"mask": number}, None)
        return True

    def _add(self, call: Any, answer: Answer) -> None:
        if self.model.rejected:
            answer, self.model.rejected = {"answer": answer, "rejected": self.model.rejected}, []
        self.case.calls.append(call)
        self.case.answers.append(answer)


def shown(plan: Plan) -> Answer:
    """A plan as the core's example prints it."""
    return {
        "step": plan.step,
        "prefill": [[*_row(row), row.length, row.samples] for row in plan.prefill],
        "decode": [_row(row) for row in plan.decode],
        "new_slots": [list(new) for new in plan.new_slots],
        "freed_slots": plan.freed_slots,
        "appended_pages": [list(page) for page in plan.appended_pages],
    }


def _row(row: Row) -> list[int]:
    return [row.request.id, row.request.slot, row.start]


def built_replay() -> Path:
    """Builds the core's example; its path."""
    command = [sys.executable, str(ROOT / "tools" / "cargo.py"), "build", *REPLAY, "--message-format", "json"]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    (program,) = (path for line in told.splitlines() if (path := json.loads(line).get("executable")) is not None)
    return Path(program)


def differences(replay: Path, seeds: range) -> Iterator[str]:
    """The first difference of each case in which model and core disagree."""
    with subprocess.Popen([replay], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as core:
        assert core.stdin is not None
        assert core.stdout is not None
        for seed in seeds:
            case = Recorder(seed).record()
            core.stdin.write(case.line() + "\n")
            core.stdin.flush()
            line = core.stdout.readline()
            found = _difference(case, json.loads(line or "[]"))
            if found is not None:
                yield found
            if not line:
                return
        core.stdin.close()


def _difference(case: Case, answers: list[Answer]) -> str | None:
    expected = json.loads(json.dumps(case.answers))
    if answers == expected:
        return None
    index = next(
        (i for i, (ours, core) in enumerate(zip(expected, answers, strict=False)) if ours != core), len(answers)
    )
    core = answers[index] if index < len(answers) else "the core has ended"
    return (
        f"seed {case.seed}, call {index} of {len(case.calls)}: {case.calls[index]}\n"
        f"model: {expected[index]}\ncore:  {core}\nsettings: {case.settings}"
    )
