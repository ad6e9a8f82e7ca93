"""The time of a worker's step, part by part: the same plans with compiled kernels and with torch alone.

    python tests/bench/cpu/step_profile.py MODEL --out tests/bench/results/step-profile.json

Runs a rank in this process, without the wire, on one and on eight decoding requests and on prompts of 192 and 512
tokens.
Times are those of the quickest of some repetitions; parts are timed by what wraps them in the step, and the
layers' parts by calling each kernel alone with the step's shapes. With `--threads 1` times are processor time, which
other processes of the machine change little; otherwise they are wall time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from plait_kernels.cpu import library
from plait_kernels.linear import CpuMatrix
from plait_proto import IS_LAST_CHUNK, NewSlot, Plan
from plait_worker import rank as worker_rank
from plait_worker.attention.backend import requirements_for
from plait_worker.attention.mha.cpu_mha import CpuMhaStep
from plait_worker.attention.selection import choose_attention
from plait_worker.attention.spec import MhaShape
from plait_worker.cache import KVCache
from plait_worker.models.decoder import MhaDecoder
from plait_worker.models.loader import load_model
from plait_worker.parallel import Parallel
from plait_worker.rows import Rows
from plait_worker.slots import Slots

CPU = torch.device("cpu")
Now = Callable[[], float]
QUANTISED, BFLOAT16, TORCH = "compiled kernels, Q4_1 and Q8_0 weights", "compiled kernels, bfloat16", "torch alone"
PAGE = 64
PAGES_EACH = 12
NUM_SLOTS = 8
CONTEXT = 160
REPETITIONS = 12
PARTS = ("build_rows", "prompt_records", "sample", "output_records", "read_plan")
"""Functions of the loop that are timed one by one."""


@dataclass
class Case:
    """One step, repeated: rows of (context, new tokens)."""

    name: str
    rows: list[tuple[int, int]]

    @property
    def is_prefill(self) -> bool:
        return self.rows[0][1] > 1


CASES = (
    Case(f"decode, 1 row at {CONTEXT}", [(CONTEXT, 1)]),
    Case(f"decode, 8 rows at {CONTEXT}", [(CONTEXT, 1)] * 8),
    Case("decode, 8 rows at 544", [(544, 1)] * 8),
    Case("prefill, 192 tokens", [(0, 192)]),
    Case("prefill, 512 tokens", [(0, 512)]),
)


@dataclass
class Clock:
    """Seconds by part, of the quickest repetition so far."""

    now: Now
    parts: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = self.now()
        yield
        self.parts[name] = self.parts.get(name, 0.0) + self.now() - began


def make_rank(model: str, threads: int, dtype: str = "auto") -> worker_rank.Rank:
    torch.set_num_threads(threads)
    library.set_num_threads(threads)
    loaded = load_model(Path(model), dtype, CPU, Parallel())
    num_pages = NUM_SLOTS * PAGES_EACH
    return worker_rank.Rank(
        model=loaded,
        cache=KVCache(loaded.cache_specs, num_pages, PAGE, CPU),
        attention=choose_attention("auto", requirements_for(loaded.attention_specs, PAGE, PAGE, 0, CPU)),
        slots=Slots(NUM_SLOTS, num_pages, PAGE, PAGES_EACH * PAGE, CPU),
        parallel=Parallel(),
    )


def words(values: list[int]) -> bytes:
    return np.array(values, dtype="<u4").tobytes()


def plan(rows: list[tuple[int, int]], new: bool, is_prefill: bool) -> Plan:
    slots = range(len(rows))
    flat = [
        word
        for slot, (start, length) in enumerate(rows)
        for word in ((slot, start, length, IS_LAST_CHUNK) if is_prefill else (slot, start))
    ]
    ids = np.random.default_rng().integers(1000, 40000, sum(length for _, length in rows)).tolist()
    pages = [word for slot in slots for page in range(PAGES_EACH) for word in (slot, slot * PAGES_EACH + page)]
    return Plan(
        step=1,
        num_prefill=len(rows) if is_prefill else 0,
        num_decode=0 if is_prefill else len(rows),
        new_slots=tuple(NewSlot(slot, 0, 0.0, 0, 1.0, 0.0, 0, None, None) for slot in slots) if new else (),
        decision=None,
        rows=words(flat),
        token_ids=words(ids) if is_prefill else b"",
        appended_pages=words(pages) if new else b"",
        freed_slots=b"",
    )


def timed_step(rank: worker_rank.Rank, case: Case, index: int, now: Now) -> dict[str, float]:
    """One step of the case on fresh slots, or one token further on; seconds by part."""
    if case.is_prefill or index == 0:
        rank.slots._is_live_N[:] = False
    rows = [(start + (0 if case.is_prefill else index), length) for start, length in case.rows]
    if not case.is_prefill and index == 0:
        rank.step(plan([(0, start) for start, _ in rows], new=True, is_prefill=True))
    step = plan(rows, new=case.is_prefill, is_prefill=case.is_prefill)
    clock = Clock(now)
    with instrumented(rank, clock), clock.part("step"):
        rank.step(step)
    return clock.parts


@contextmanager
def instrumented(rank: worker_rank.Rank, clock: Clock) -> Iterator[None]:
    """The step's parts report to the clock."""

    def wrap(function: Callable[..., object], name: str) -> Callable[..., object]:
        def timed(*arguments: object) -> object:
            with clock.part(name):
                return function(*arguments)

        return timed

    model, attention = type(rank.model), type(rank.attention)
    methods = (
        (model, "forward", "forward"),
        (model, "shard_logits", "head"),
        (attention, "prepare", "prepare attention"),
    )
    with ExitStack() as patches:
        for owner, name, part in (*((worker_rank, name, name) for name in PARTS), *methods):
            patches.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name), part)))
        yield


def quickest(samples: list[dict[str, float]]) -> dict[str, float]:
    best = min(samples, key=lambda parts: parts["step"])
    inside = ("forward", "head", "sample", "build_rows", "prepare attention", "output_records", "read_plan")
    return best | {"the rest": best["step"] - sum(best.get(name, 0.0) for name in inside)}


def least(function: Callable[[], object], now: Now) -> float:
    times = []
    for _ in range(REPETITIONS):
        began = now()
        function()
        times.append(now() - began)
    return min(times)


def layer_parts(rank: worker_rank.Rank, case: Case, now: Now) -> dict[str, float]:
    """Seconds of the layers' GEMMs and attention, each called alone, over all layers."""
    model = rank.model
    if not isinstance(model, MhaDecoder):
        return {}
    num_tokens = sum(length for _, length in case.rows)
    layers = [
        each.multiply
        for block in model.blocks
        for each in (block.attention.qkv, block.attention.output, block.mlp.gate_up, block.mlp.down)  # type: ignore[attr-defined]
    ]
    panels = [layer for layer in layers if isinstance(layer, CpuMatrix)]
    inputs = [torch.randn(num_tokens, layer.num_inputs).to(layer.dtype) for layer in panels[:4]]

    def products() -> None:
        for index, layer in enumerate(panels):
            layer(inputs[index % 4])

    return {
        "of it products, alone": least(products, now),
        "of it attention, alone": least(attention_alone(rank, model, case), now),
    }


def attention_alone(rank: worker_rank.Rank, model: MhaDecoder, case: Case) -> Callable[[], None]:
    shape = model.attention_specs[0]
    assert isinstance(shape, MhaShape)
    num_tokens = sum(length for _, length in case.rows)
    table = torch.arange(len(case.rows) * PAGES_EACH, dtype=torch.int32).view(len(case.rows), PAGES_EACH)
    rows = Rows(
        num_prefill=len(case.rows) if case.is_prefill else 0,
        slots=list(range(len(case.rows))),
        starts=[start for start, _ in case.rows],
        lengths=[length for _, length in case.rows],
        token_ids_T=torch.zeros(num_tokens, dtype=torch.int64),
        positions_T=torch.zeros(num_tokens, dtype=torch.int64),
        page_table_RW=table,
        sample_index_S=torch.zeros(0, dtype=torch.int64),
    )
    (step,) = rank.attention.prepare(rows)
    queries = torch.randn(num_tokens, shape.num_heads, shape.head_dim).to(shape.dtype)

    def attend() -> None:
        for pages in rank.cache.layers:
            if isinstance(step, CpuMhaStep):
                step.rows.attend(queries, pages)

    return attend


def profile(ranks: dict[str, worker_rank.Rank], threads: int) -> list[dict[str, object]]:
    now = time.process_time if threads == 1 else time.perf_counter
    rows: list[dict[str, object]] = []
    for case in CASES:
        for way, rank in ranks.items():
            # As a rank starts: torch's own threads would spin and slow the compiled kernels.
            torch.set_num_threads(1 if way != TORCH else threads)
            samples = [timed_step(rank, case, index, now) for index in range(REPETITIONS)]
            extra = layer_parts(rank, case, now) if way != TORCH else {}
            for part, seconds in (quickest(samples[1:]) | extra).items():
                rows.append(
                    {"case": f"{case.name}, {way}", "metric": part, "unit": "ms", "value": round(seconds * 1e3, 3)}
                )
                print(f"{case.name:26s} {way:18s} {part:24s} {seconds * 1e3:9.3f} ms", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ranks = {
        QUANTISED: make_rank(options.model, options.threads),
        BFLOAT16: make_rank(options.model, options.threads, "bfloat16"),
    }
    with mock.patch.object(library, "open_library", return_value=None):
        ranks[TORCH] = make_rank(options.model, options.threads, "bfloat16")
    with torch.inference_mode():
        rows = profile(ranks, options.threads)
    if options.out:
        record = {
            "command": "tests/bench/cpu/step_profile.py",
            "threads": options.threads,
            "clock": "processor" if options.threads == 1 else "wall",
            "rows": rows,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
