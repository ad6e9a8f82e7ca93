"""One layer's attention in steps of prompts and decode rows: by two calls, by one, or by two side by side.

    python tests/bench/gpu/mixed_attention.py --heads 32/8 --seconds 80 --out FILE

Also decode rows of which one has a far longer KV than the others. Each way is the backend's own step. It is compared
with float64 on a small step, then captured over pages that are in no cache, and replayed. Steps that a server captures
have the rows and bounds of a graph here too, most rows empty. Larger ones have the host's own lengths.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from plait.bench.result_file import commit, machine, versions
from plait_kernels.attention import PagedPrefill, reference
from plait_kernels.kv_cache import UNSCALED, PageScales
from plait_worker.attention.backend import AttentionBackend, BackendRequirements
from plait_worker.attention.mha.flashinfer_mha import FlashinferMha
from plait_worker.attention.mha.separate_kernels import DecodeRows, PrefillRows, SeparateKernelsStep
from plait_worker.attention.mha.triton_mha import TritonMha
from plait_worker.attention.mha.trtllm_mha import TrtllmMha
from plait_worker.attention.spec import MhaShape
from plait_worker.graph_sizes import PROMPT_ROWS, TILE, TILES
from plait_worker.rows import DeviceLengths, Rows
from torch import Tensor
from triton.errors import TritonError

GPU = torch.device("cuda")
PAGE_SIZE, HEAD_DIM = 64, 128
DECODE_ROWS, MEAN_KV_LENGTHS = (1, 4, 16, 64, 256), (128, 1024, 8192)
PROMPTS, CONTEXTS = ((64,), (256,), (1024,), (4096,), (1024, 1024)), (0, 4096)
SKEWED = ((15, 512, 100_000), (63, 512, 100_000), (255, 512, 100_000), (63, 512, 4096), (63, 1024, 16_384))
"""Rows beside the long one, their KV length and its."""
EVEN = ((1, 512), (1, 8192), (4, 2048), (16, 1024), (32, 1024), (64, 192), (64, 1024), (128, 1024), (256, 192))
"""Rows of equal KV length."""
DRAWN = ((64, 64), (40, 64), (40, 256), (20, 32))
"""Rows of random KV lengths, and the rows that the graph has."""
LOG_LENGTH, SPREAD = 6.94, 0.678
"""Of the normal distribution of the logarithms of KV lengths: a mean of 1,300 and one in a hundred beyond 5,000."""
MAX_TOKENS, TABLE_WIDTH = 8192, 2048
MAX_POSITIONS = TABLE_WIDTH * PAGE_SIZE
"""Of a request: the bound that a graph knows."""
NUM_VIEWS, VIEW_STEP = 8, 8
"""Calls of one graph, and the pages between them: no call reads what the one before has read."""
MANY_BYTES = 256 << 20
"""No cache holds a part worth mentioning of so many."""
REPLAYS = 20
TOLERANCE = 0.03
FAILURES = (RuntimeError, ValueError, AssertionError, TypeError, LookupError, AttributeError, ImportError, TritonError)
"""Of a way that does not run: recorded, and the others go on."""

Form = Literal["split", "whole", "two streams"]
Attend = Callable[[Tensor, Tensor], Tensor]
"""Of queries ``[T, H, E]`` over a layer's pages."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of one step's rows, on the host."""

    name: str
    contexts: list[int]
    """Of each row, what lies before its new tokens."""
    new: list[int]
    num_prompts: int

    @property
    def seen(self) -> list[int]:
        return [context + new for context, new in zip(self.contexts, self.new, strict=True)]

    @property
    def prompt_tokens(self) -> int:
        return sum(self.new[: self.num_prompts])

    @property
    def is_captured(self) -> bool:
        """Whether a server has a graph for it: as far as its tokens and rows say."""
        return sum(self.new) <= TILE * TILES[-1] and 0 < self.num_prompts < PROMPT_ROWS


def mixed(num_decode: int, mean_kv_length: int, prompts: Sequence[int], context: int) -> Lengths:
    """KV lengths go from half the mean to one and a half."""
    step = mean_kv_length / max(num_decode - 1, 1)
    kv_lengths = (
        [int(mean_kv_length / 2 + row * step) for row in range(num_decode)] if num_decode > 1 else [mean_kv_length]
    )
    tokens = "+".join(map(str, prompts))
    name = f"{num_decode} decode rows at {mean_kv_length}, prompts {tokens} behind {context}"
    contexts = [context] * len(prompts) + [kv_length - 1 for kv_length in kv_lengths]
    return Lengths(name, contexts, [*prompts, *[1] * num_decode], len(prompts))


def grid() -> Iterator[Lengths]:
    for kv_length, num, context, prompts in itertools.product(MEAN_KV_LENGTHS, DECODE_ROWS, CONTEXTS, PROMPTS):
        yield mixed(num, kv_length, prompts, context)


def skewed() -> Iterator[Lengths]:
    """One long row among short ones, and as many rows with their mean KV length; other even ones; random ones."""
    for num, kv_length, longest in SKEWED:
        mean = (num * kv_length + longest) // (num + 1)
        yield decoding(f"{num} at {kv_length} and one at {longest}", [kv_length] * num + [longest])
        yield decoding(f"{num + 1} at {mean}", [mean] * (num + 1))
    for num, kv_length in EVEN:
        yield decoding(f"{num} at {kv_length}", [kv_length] * num)
    for num, room in DRAWN:
        drawn = random.Random(num)
        kv_lengths = [int(drawn.lognormvariate(LOG_LENGTH, SPREAD)) + 1 for _ in range(num)]
        yield decoding(f"{num} drawn, room for {room}", kv_lengths + [1] * (room - num))


def decoding(name: str, kv_lengths: list[int]) -> Lengths:
    return Lengths(f"decode rows: {name}", [kv_length - 1 for kv_length in kv_lengths], [1] * len(kv_lengths), 0)


def scattered_table(lengths: Lengths, num_pages: int) -> Tensor:
    """int32 ``[R, W]``: each row's own pages, in random order; page 0 after a row's end."""
    counts_R = torch.tensor([-(-seen // PAGE_SIZE) for seen in lengths.seen], device=GPU)
    table_RW = torch.zeros(len(counts_R), TABLE_WIDTH, dtype=torch.int32, device=GPU)
    is_used = torch.arange(TABLE_WIDTH, device=GPU) < counts_R[:, None]
    table_RW[is_used] = (torch.randperm(num_pages - 1, device=GPU)[: int(counts_R.sum())] + 1).to(torch.int32)
    return table_RW


def host_rows(lengths: Lengths, table_RW: Tensor) -> Rows:
    """The step as a server launches it operation by operation."""
    new_R = torch.tensor(lengths.new, device=GPU)
    first_R = torch.tensor(lengths.contexts, device=GPU) - (new_R.cumsum(0) - new_R)
    num_tokens = sum(lengths.new)
    return Rows(
        num_prefill=lengths.num_prompts,
        slots=list(range(len(lengths.new))),
        starts=lengths.contexts,
        lengths=lengths.new,
        token_ids_T=torch.zeros(num_tokens, dtype=torch.int64, device=GPU),
        positions_T=torch.arange(num_tokens, device=GPU) + first_R.repeat_interleave(new_R),
        page_table_RW=table_RW,
        sample_index_S=torch.zeros(0, dtype=torch.int64, device=GPU),
    )


def graph_rows(lengths: Lengths, rows: Rows, whole: bool) -> Rows:
    """The same step as a graph has it: empty rows after the prompts, lengths on the device, bounds on the host."""
    num, empty = lengths.num_prompts, PROMPT_ROWS - lengths.num_prompts
    new = [*lengths.new[:num], *[0] * empty, *lengths.new[num:]]
    seen = [*lengths.seen[:num], *[0] * empty, *lengths.seen[num:]]
    table_RW = rows.page_table_RW
    unused = torch.zeros(empty, TABLE_WIDTH, dtype=torch.int32, device=GPU)
    of_kernel = len(new) if whole else PROMPT_ROWS
    new_R, seen_R = (torch.tensor(values, dtype=torch.int32, device=GPU) for values in (new, seen))
    ends_q, ends_kv = (
        torch.nn.functional.pad(x[:of_kernel].cumsum(0), (1, 0)).to(torch.int32) for x in (new_R, seen_R)
    )
    row_T = torch.arange(len(new), device=GPU).repeat_interleave(new_R)
    return dataclasses.replace(
        rows,
        num_prefill=of_kernel,
        slots=[],
        starts=[],
        lengths=[lengths.prompt_tokens, *[0] * (PROMPT_ROWS - 1), *lengths.new[num:]],
        page_table_RW=torch.cat((table_RW[:num], unused, table_RW[num:])),
        device_lengths=DeviceLengths(
            ends_q, ends_kv, seen_R[:of_kernel].clone(), row_T, lengths.prompt_tokens, MAX_POSITIONS
        ),
    )


class OwnKernels(TritonMha):
    """Ours for both sorts of rows."""

    def prefill(self, q_THE: Tensor, pages: Tensor, rows: PrefillRows, out_THE: Tensor, scales: PageScales) -> None:
        self.prefill_by_triton(q_THE, pages, rows, out_THE, scales)


class DividedAlike(TritonMha):
    """Ours without a look at KV lengths."""

    def decode_rows(self, table_DW: Tensor, lengths_D: Tensor) -> DecodeRows:
        return DecodeRows(table_DW, lengths_D)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to attend."""

    name: str
    backend: AttentionBackend[Any]
    form: Form = "split"

    def rows(self, lengths: Lengths, table_RW: Tensor) -> Rows:
        """As the backend gets them."""
        rows, whole = host_rows(lengths, table_RW), self.form == "whole"
        if lengths.is_captured and self.backend.captured_prefill is not None:
            return graph_rows(lengths, rows, whole)
        return dataclasses.replace(rows, num_prefill=rows.num_rows) if whole else rows

    def attend(self, rows: Rows) -> Attend:
        step = self.backend.prepare(rows)
        if self.form != "two streams":
            return lambda q_THE, pages: step.attend(q_THE, pages, UNSCALED)
        return side_by_side(step)


def side_by_side(step: SeparateKernelsStep) -> Attend:
    """Both calls at once, each on a stream."""
    side = torch.cuda.Stream()

    def attend(q_THE: Tensor, pages: Tensor) -> Tensor:
        backend, num, main = step.backend, step.num_prefill_tokens, torch.cuda.current_stream()
        out_THE = backend.output_THE[: q_THE.shape[0]]
        assert step.prefill is not None
        side.wait_stream(main)
        with torch.cuda.stream(side):
            backend.decode(q_THE[num:], pages, step.decode, out_THE[num:], UNSCALED)
        backend.prefill(q_THE[:num], pages, step.prefill, out_THE[:num], UNSCALED)
        main.wait_stream(side)
        return out_THE

    return attend


def ways(shape: MhaShape) -> tuple[list[Way], list[Way]]:
    """For mixed steps, and for decode rows alone; those whose backend does not start are said and left out."""
    made: dict[str, AttentionBackend[Any]] = {}
    for name, kind in (
        ("triton", TritonMha),
        ("trtllm_mha", TrtllmMha),
        ("flashinfer", FlashinferMha),
        ("own", OwnKernels),
        ("alike", DividedAlike),
    ):
        try:
            made[name] = kind(BackendRequirements(shape, PAGE_SIZE, 0, MAX_TOKENS, GPU))
        except FAILURES as failure:
            print(f"{name} does not start: {why(failure)}", flush=True)
    every = [
        ("split: FMHAv2, then our decode", "triton", "split"),
        ("split: FMHAv2, then XQA", "trtllm_mha", "split"),
        ("split: our prefill, then our decode", "own", "split"),
        ("split: fa3, then fa2", "flashinfer", "split"),
        ("two streams: FMHAv2 beside our decode", "triton", "two streams"),
        ("two streams: FMHAv2 beside XQA", "trtllm_mha", "two streams"),
        ("whole: FMHAv2", "trtllm_mha", "whole"),
        ("whole: our prefill", "own", "whole"),
        ("whole: fa3", "flashinfer", "whole"),
    ]
    decode = [
        ("our decode", "triton"),
        ("our decode, the same splits for all rows", "alike"),
        ("XQA", "trtllm_mha"),
        ("planned fa2", "flashinfer"),
    ]
    of_mixed = [Way(title, made[name], form) for title, name, form in every if name in made]  # type: ignore[arg-type]
    return of_mixed, [Way(title, made[name]) for title, name in decode if name in made]


def why(failure: Exception) -> str:
    return f"{type(failure).__name__}: {(str(failure) or repr(failure)).splitlines()[0][:200]}"


class Bench:
    """The pages and queries, and what was measured over them."""

    def __init__(self, shape: MhaShape, found: list[dict[str, object]]) -> None:
        """Pages for the longest step of the grid; rows of the results are added to ``found``."""
        self.shape = shape
        most = max(sum(-(-seen // PAGE_SIZE) for seen in lengths.seen) for lengths in (*grid(), *skewed()))
        self.num_pages = most + 1
        num = self.num_pages + NUM_VIEWS * VIEW_STEP
        self.pages = torch.empty(num, 2, shape.num_kv_heads, PAGE_SIZE, HEAD_DIM, dtype=torch.bfloat16, device=GPU)
        for part in self.pages.split(1024):
            part.normal_()
        self.q_THE = torch.randn(MAX_TOKENS, shape.num_heads, HEAD_DIM, dtype=torch.bfloat16, device=GPU)
        self.swept = torch.zeros(64 << 20, device=GPU)
        self.found = found

    def check(self, way: Way, lengths: Lengths) -> None:
        """End the run if this way's result is wrong; do nothing if it does not run."""
        table_RW = scattered_table(lengths, self.num_pages)
        num = sum(lengths.new)
        given = way.attend(way.rows(lengths, table_RW))(self.q_THE[:num], self.pages).double()
        right = torch.empty_like(given)
        ends = torch.tensor([0, *itertools.accumulate(lengths.new)])
        width = -(-max(lengths.seen) // PAGE_SIZE)
        rows = PagedPrefill(ends, torch.tensor(lengths.seen), table_RW[:, :width])
        reference.prefill_paged(self.q_THE[:num].double(), self.pages, rows, self.shape.scale, right, UNSCALED)
        error = float((given - right).abs().max() / right.abs().max())
        print(f"{way.name}, {lengths.name}: off by {error:.4f} of the largest value", flush=True)
        if not error <= TOLERANCE:
            raise SystemExit(f"{way.name} is wrong: {lengths.name}")
        self._note(lengths, way, "error over the largest value", "share", error)

    def measure(self, way: Way, lengths: Lengths) -> float:
        """Microseconds of one call, median of the replays; and the host's for its plan, if there is one."""
        rows = way.rows(lengths, scattered_table(lengths, self.num_pages))
        attend = way.attend(rows)
        bytes_read = sum(lengths.seen) * 4 * self.shape.num_kv_heads * HEAD_DIM
        us = self._replayed_us(attend, sum(lengths.new), 2 if bytes_read > MANY_BYTES else NUM_VIEWS)
        self._note(lengths, way, way.name, "us", us)
        if not way.backend.is_capturable:
            self._note(lengths, way, f"{way.name}, on the host", "us", prepared_us(way, rows))
        return us

    def _replayed_us(self, attend: Attend, num_tokens: int, num_calls: int) -> float:
        q_THE = self.q_THE[:num_tokens]
        views = [self.pages[view * VIEW_STEP :][: self.num_pages] for view in range(num_calls)]
        attend(q_THE, views[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for pages in views:
                attend(q_THE, pages)
        graph.replay()
        times = []
        for _ in range(REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.swept.sum()  # 256 MB that push the pages out, and hide the launch of the graph
            start.record()
            graph.replay()
            end.record()
            times.append((start, end))
        torch.cuda.synchronize()
        return float(statistics.median(start.elapsed_time(end) for start, end in times)) * 1000 / num_calls

    def missing(self, lengths: Lengths, way: Way, reason: str) -> None:
        case = self._case(lengths)
        row: dict[str, object] = {"case": case, "metric": way.name, "unit": "us", "value": None, "missing": reason}
        self.found.append(row)

    def _note(self, lengths: Lengths, way: Way, metric: str, unit: str, value: float) -> None:
        name = metric if unit == "us" else f"{way.name}, {metric}"
        row = {"case": self._case(lengths), "metric": name, "unit": unit, "value": round(value, 5 - 3 * (unit == "us"))}
        self.found.append(row)

    def _case(self, lengths: Lengths) -> str:
        form = ", as captured" if lengths.is_captured else ""
        return f"heads {self.shape.num_heads}/{self.shape.num_kv_heads}: {lengths.name}{form}"


def prepared_us(way: Way, rows: Rows) -> float:
    """Microseconds that the host needs to prepare a step, median of five."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        way.backend.prepare(rows)
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def run(bench: Bench, cases: Sequence[Lengths], deadline: float, keep: Callable[[], object]) -> None:
    """Checks, then the cases, kept after each; what the time does not reach is said and recorded."""
    of_mixed, of_decode = ways(bench.shape)
    small = [mixed(5, 300, (70, 1, 33), 100), mixed(5, 300, (2000, 7), 65)]
    few = [
        decoding("5 at 65 and one at 5000", [65] * 5 + [5000]),
        decoding("99 at 65 and one at 9999", [65] * 99 + [9999]),
    ]
    right_mixed = [way for way in of_mixed if all([attempt(bench, way, each, bench.check) for each in small])]
    right_decode = [way for way in of_decode if all([attempt(bench, way, each, bench.check) for each in few])]
    for lengths in cases:
        tried = right_mixed if lengths.num_prompts else right_decode
        if time.perf_counter() > deadline:
            print(f"{lengths.name}: out of time", flush=True)
            for way in tried:
                bench.missing(lengths, way, "out of time")
            continue
        times = {way.name: attempt(bench, way, lengths, bench.measure) for way in tried}
        print(
            lengths.name, {name: us if isinstance(us, bool) else round(us, 1) for name, us in times.items()}, flush=True
        )
        keep()


def attempt(bench: Bench, way: Way, lengths: Lengths, work: Callable[[Way, Lengths], float | None]) -> float | bool:
    """The work's result, or true; false if it failed, which is printed and recorded."""
    try:
        given = work(way, lengths)
    except FAILURES as failure:
        print(f"{way.name}, {lengths.name}: MISSING: {why(failure)}", flush=True)
        bench.missing(lengths, way, why(failure))
        return False
    return True if given is None else given


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="32/8", help="query heads/key-value heads, several by commas")
    parser.add_argument("--seconds", type=float, default=80, help="no case of a shape starts later, after its share")
    parser.add_argument("--decode-only", action="store_true", help="leave steps with prompts out")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    shapes = [tuple(map(int, pair.split("/"))) for pair in options.heads.split(",")]
    began, found = time.perf_counter(), list[dict[str, object]]()
    result = {
        "commit": commit(),
        "command": f"tests/bench/gpu/mixed_attention.py --heads {options.heads} --seconds {options.seconds:g}",
        "machine": {"gpu": torch.cuda.get_device_name()} | machine(),
        "versions": versions(("plait", "torch", "triton", "flashinfer-python")),
        "rows": found,
    }
    for number, (num_heads, num_kv_heads) in enumerate(shapes, 1):
        bench = Bench(MhaShape(num_heads, num_kv_heads, HEAD_DIM, HEAD_DIM**-0.5, torch.bfloat16), found)
        deadline = began + options.seconds * number / len(shapes)
        cases = [*skewed(), *(() if options.decode_only else grid())]
        run(bench, cases, deadline, lambda: options.out.write_text(json.dumps(result, indent=1) + "\n"))
        del bench


if __name__ == "__main__":
    main()
