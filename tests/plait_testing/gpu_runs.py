"""Runs against a server on a GPU, for any model and backend.

A wrong answer that transformers gives too, in float32, is the model's own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from plait_testing import recall
from plait_testing.metrics import read_metrics
from plait_testing.model_mistakes import mistakes_of_the_engine
from plait_testing.recording import Record
from plait_testing.running_server import Server, StartServer

PAGE_SIZE = 64
NUM_PAGES = 2048
NUM_WRITERS = 4
"""Each wants a quarter of a pool that is too small: together with the questions they force preemptions."""
# FP8 rounds to four bits. The cost is recorded and may be a tenth of the answers at most.
SHARE_WRONG_OF_FP8 = 0.1
STRESSED = Path(__file__).parent / "stressed"
# One setting varied at a time from the default: mixed, overlap, CUDA graphs.
VARIANTS: dict[str, tuple[str, ...]] = {
    "chunk-512": ("--long-prefill-token-threshold", "512"),
    "chunk-8192": ("--max-batch-tokens", "8192"),
    "no-graphs": ("--no-cuda-graphs",),
    "no-overlap": ("--no-overlap",),
    "few-graphs": ("--cuda-graph-max-bs", "3"),
    "preempted": (),
}

NUM_CHOICES = 4
# One setting varied at a time, for answers of which every other one is constrained.
CONSTRAINED: dict[str, tuple[str, ...]] = {
    "default": (),
    "no-mixed": ("--no-mixed",),
    "no-overlap": ("--no-overlap",),
    "no-mixed no-overlap": ("--no-mixed", "--no-overlap"),
    "chunk-64": ("--long-prefill-token-threshold", "64"),
    "no-graphs": ("--no-cuda-graphs",),
    "no-prefix-cache": ("--no-prefix-cache",),
    "preempted": (),
}

SAMPLED: dict[str, dict[str, object]] = {
    "random": {"temperature": 0.05, "seed": 3},
    "filtered": {"temperature": 1, "top_k": 1, "seed": 3},
}


def cases(backends: Sequence[str], variants: Iterable[str]) -> list[tuple[str, str, str]]:
    """Backend, mixed or not, and variant: every backend by default, each variant with the one that is chosen."""
    defaults = [(backend, mixed, "default") for backend in backends for mixed in ("--mixed", "--no-mixed")]
    return defaults + [("auto", "--mixed", variant) for variant in variants]


def shared_cases(backends: Sequence[str], chunk: str) -> list[tuple[str, str]]:
    """Each backend over pages that another request filled, and over a pool that evicts."""
    return [*((backend, "hits") for backend in backends), ("auto", "evicted"), ("auto", chunk)]


def total(metrics: Mapping[str, float], name: str, label: str = "") -> float:
    """A counter of all replicas."""
    return sum(value for found, value in metrics.items() if found.startswith(name) and label in found)


@dataclass(frozen=True)
class GpuRuns:
    """Runs of one check model."""

    model: str
    check_models: Path
    server: StartServer
    sized: Callable[[int, int], int]
    record: Record
    num_ranks: int = 1
    shares_experts: bool = False
    """The ranks are replicas with ``--dp-attention``."""

    @property
    def name(self) -> str:
        """Of the model and its ranks, as a figure's case has it."""
        if self.shares_experts:
            return f"{self.model} dp-attention-{self.num_ranks}"
        return self.model if self.num_ranks == 1 else f"{self.model} tp-{self.num_ranks}"

    @property
    def layout(self) -> tuple[str, ...]:
        """Of the ranks, as flags."""
        num = str(self.num_ranks)
        return ("--dp", num, "--dp-attention") if self.shares_experts else ("--tp", num)

    def start(self, backend: str, num_pages: int, *flags: str) -> Server:
        running = self.server(
            self.check_models / self.model,
            *("--device", "cuda", *self.layout),
            *("--attention-backend", backend, "--num-pages", str(num_pages)),
            *flags,
        )
        assert running.url, running.errors[-8000:]
        return running

    def judge(self, asked: list[recall.Problem], wrong: list[recall.Wrong]) -> list[recall.Wrong]:
        """Wrong answers that are not the model's own mistakes."""
        return mistakes_of_the_engine(self.check_models / self.model, asked, wrong)

    def note(self, case: str, num_asked: int, num_wrong: int, num_mistakes: int) -> None:
        self.record(f"{self.name} {case}", "problems_right", "problems", num_asked - num_wrong, num_asked)
        self.record(f"{self.name} {case}", "mistakes_of_the_engine", "problems", num_mistakes, 0)

    def answers(self, backend: str, mixed: str, variant: str, *flags: str) -> None:
        """Dialogues of up to 2k and 8k tokens are answered right, by the kind of steps that is named."""
        asked = recall.problems(seed=1, num=self.sized(40, 400), context=2048)
        asked += recall.problems(seed=2, num=self.sized(10, 100), context=8192)
        longest = -(-(max(map(recall.num_bytes, asked)) + 8) // PAGE_SIZE)
        num_pages = longest if variant == "preempted" else NUM_PAGES
        running = self.start(backend, num_pages, mixed, *flags)
        num_writers = NUM_WRITERS if variant == "preempted" else 0
        with recall.writers(running.url, num_writers, num_pages * PAGE_SIZE // 4, self.model):
            wrong = recall.ask_all(running.url, asked, model=self.model, concurrency=13)
        metrics = read_metrics(running.url)
        case = f"{backend} {mixed.removeprefix('--')} {variant}"
        mistakes = self.judge(asked, wrong)
        self.note(case, len(asked), len(wrong), len(mistakes))
        preemptions = total(metrics, "plait_preemptions_total")
        self.record(f"{self.name} {case}", "preemptions", "preemptions", preemptions)
        assert len(mistakes) <= (len(asked) * SHARE_WRONG_OF_FP8 if "fp8" in variant else 0), mistakes
        assert (total(metrics, "plait_steps_total", 'kind="mixed"') == 0) == (mixed == "--no-mixed")
        assert (preemptions > 0) == (variant == "preempted")

    def shared_tables(self, backend: str, variant: str, *flags: str) -> None:
        """Prompts that share a prefix are answered right from cached pages."""
        num_tables, num_each, context = 5, self.sized(10, 100), 4096
        tables = [recall.about_one_table(seed, num_each, context) for seed in range(num_tables)]
        num_pages = 3 * context // PAGE_SIZE if variant == "evicted" else NUM_PAGES
        running = self.start(backend, num_pages, *flags)
        num_wrong, mistakes = 0, list[recall.Wrong]()
        for first in range(0, num_each, 5):
            for table in tables:
                asked = table[first : first + 5]
                wrong = recall.ask_all(running.url, asked, model=self.model, concurrency=3)
                num_wrong, mistakes = num_wrong + len(wrong), mistakes + self.judge(asked, wrong)
        metrics = read_metrics(running.url)
        share = metrics["plait_prefix_hit_tokens_total"] / metrics["plait_prompt_tokens_total"]
        case = f"{backend} shared tables {variant}"
        self.note(case, num_tables * num_each, num_wrong, len(mistakes))
        self.record(f"{self.name} {case}", "share_of_prompt_tokens_cached", "share", share)
        assert mistakes == []
        assert share > (0.2 if variant == "evicted" else 0.5)
        assert (metrics["plait_prefix_evictions_total"] > 0) == (variant == "evicted")

    def constrained(self, variant: str, *flags: str) -> None:
        """Four choices of each answer are right, where every other request is constrained."""
        asked = recall.problems(seed=11, num=self.sized(12, 100), context=2048)
        asked += recall.about_one_table(7, self.sized(12, 100), 2048)
        longest = recall.longest_in_pages(asked, PAGE_SIZE) + NUM_CHOICES
        num_pages = longest if variant == "preempted" else NUM_PAGES
        running = self.start("auto", num_pages, *flags)
        num_writers = NUM_WRITERS if variant == "preempted" else 0
        with recall.writers(running.url, num_writers, num_pages * PAGE_SIZE // 4, self.model):
            wrong = recall.ask_all(
                running.url, asked, model=self.model, concurrency=13, own=recall.constraint, n=NUM_CHOICES
            )
        metrics = read_metrics(running.url)
        case = f"n {NUM_CHOICES}, half constrained, {variant}"
        mistakes = self.judge(asked, wrong)
        self.note(case, len(asked), len(wrong), len(mistakes))
        preemptions = total(metrics, "plait_preemptions_total")
        self.record(f"{self.name} {case}", "preemptions", "preemptions", preemptions)
        self.record(f"{self.name} {case}", "rows_left_out", "rows", total(metrics, "plait_late_masks_total"))
        assert mistakes == []
        assert total(metrics, "plait_further_choices_total") == (NUM_CHOICES - 1) * len(asked)
        assert (preemptions > 0) == (variant == "preempted")

    def samples(self) -> None:
        """Sampling that gives the likeliest token, or hardly ever another, by the kernels for the others."""
        asked = recall.problems(seed=5, num=self.sized(20, 200), context=2048)
        running = self.start("auto", NUM_PAGES)
        for name, sampling in SAMPLED.items():
            wrong = recall.ask_all(
                running.url, asked, model=self.model, concurrency=13, own=recall.unconstrained, **sampling
            )
            mistakes = self.judge(asked, wrong) if name == "filtered" else []
            self.note(f"auto {name} sampling", len(asked), len(wrong), len(mistakes))
            assert mistakes == []
            assert len(wrong) < len(asked) / 4

    def constrained_under_stress(self, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Slow steps over overwritten pages, and late masks, change none of four choices."""
        self._stress(monkeypatch)
        running = self.start("auto", NUM_PAGES, cache, "--long-prefill-token-threshold", "512")
        asked, wrong = list[recall.Problem](), list[recall.Wrong]()
        for concurrency in (3, 13, 5):
            some = recall.problems(seed=200 + concurrency, num=self.sized(6, 60), context=2048)
            some += recall.about_one_table(concurrency, self.sized(6, 60), 2048)
            found = recall.ask_all(
                running.url, some, model=self.model, concurrency=concurrency, own=recall.constraint, n=NUM_CHOICES
            )
            wrong += [dataclasses.replace(one, index=one.index + len(asked)) for one in found]
            asked += some
        mistakes = self.judge(asked, wrong)
        self.note(f"n {NUM_CHOICES}, half constrained, {cache} under stress", len(asked), len(wrong), len(mistakes))
        assert mistakes == [], running.errors[-2000:]
        assert running.stop() == 0

    def _stress(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STRESSED), os.environ.get("PYTHONPATH", "")]))

    def under_stress(self, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Slow steps over overwritten pages change no answer."""
        self._stress(monkeypatch)
        running = self.start(backend, NUM_PAGES, "--no-prefix-cache", "--long-prefill-token-threshold", "512")
        num_asked, num_wrong, mistakes = 0, 0, list[recall.Wrong]()
        for concurrency in (3, 13, 5, 8, 4, 11):  # graphs are padded, by another number of rows each time
            asked = recall.problems(seed=concurrency, num=self.sized(5, 70), context=2048)
            asked += recall.problems(seed=100 + concurrency, num=self.sized(1, 14), context=8192)
            try:
                wrong = recall.ask_all(running.url, asked, model=self.model, concurrency=concurrency)
            except httpx.HTTPError:
                pytest.fail(running.errors[-2000:])
            num_asked, num_wrong = num_asked + len(asked), num_wrong + len(wrong)
            mistakes += self.judge(asked, wrong)
        self.note(f"{backend} under stress", num_asked, num_wrong, len(mistakes))
        assert mistakes == [], running.errors[-2000:]
        assert running.stop() == 0
