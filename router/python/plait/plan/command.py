"""`plait plan`: memory, requests, expected rates and the flags to use."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from plait.errors import DONE, SettingsError
from plait.plan.choices import fitting, longest_context
from plait.plan.gpus import GPUS, Gpu
from plait.plan.layout import Layout, Memory
from plait.plan.model import PlannedModel, read_model
from plait.plan.parts import act_order_cost, parts_of
from plait.plan.rates import Expectations, Expected
from plait.plan.serve_command import command_lines
from plait.plan.settings import PlanSettings
from plait.plan.stored_form import on_gpu
from plait.plan.words import act_order_note, amount, held_as

STREAMS = (1, 8, 64, 256, 1024)
"""Loads of the second table."""
Choice = tuple[Layout, Memory, Expected]


def plan(model: str, settings: PlanSettings) -> int:
    """Print the plan; the exit code. Raises `StartError` if the model does not fit."""
    _check(settings)
    with tempfile.TemporaryDirectory(prefix="plait-") as scratch:
        print("\n".join(_Plan(model, settings, Path(scratch)).lines()))
    return DONE


def _check(settings: PlanSettings) -> None:
    if settings.server.page_size.bit_count() != 1:
        raise SettingsError(f"--page-size is {settings.server.page_size}; allowed: a power of two from 1 to 1024")


def _on(gpu: Gpu, shape: PlannedModel, quantization: str) -> PlannedModel:
    """The model as this GPU holds it."""
    return replace(shape, storage=on_gpu(shape.storage, gpu.name, gpu.is_hopper, quantization))


class _Plan:
    def __init__(self, model: str, settings: PlanSettings, scratch: Path) -> None:
        self._name, self._settings, self._load = model, settings, settings.load
        self._gpu = GPUS[settings.machine.gpu]
        self._shape = _on(self._gpu, read_model(model, scratch), settings.server.quantization)
        self._context = longest_context(self._shape, settings)
        self._expectations = Expectations(self._shape, self._gpu, scratch)
        self._fitting = fitting(self._shape, self._gpu, settings)

    def lines(self) -> Iterator[str]:
        choices = [self._choice(*laid_out) for laid_out in self._fitting.laid_out]
        best = max(choices, key=self._preference)
        yield self._summary()
        yield ""
        yield from self._layout_table(choices, best)
        yield from self._notes(choices)
        yield ""
        yield from self._expected_lines(best[0], best[1])
        yield ""
        yield from command_lines(self._name, self._settings, best[0], best[1], self._context)
        sizes = best[1].sizes
        yield f"It runs {sizes.max_seqs} requests at a time in a replica, {sizes.max_batch_tokens} tokens a step."

    def _choice(self, layout: Layout, memory: Memory) -> Choice:
        return layout, memory, self._expectations.at(layout, memory, self._load)

    def _preference(self, choice: Choice) -> tuple[bool, float]:
        """The rates know no network, so replicas inside a node come first."""
        return not self._spans_nodes(choice[0]), choice[2].output_tokens_per_second

    def _spans_nodes(self, layout: Layout) -> bool:
        return layout.spans_nodes(self._settings.machine.gpus_per_node)

    def _summary(self) -> str:
        halves = 2 if self._settings.server.kv_cache_dtype == "fp8" else 1
        return (
            f"{self._settings.machine.gpus} {self._gpu.name} of {amount(self._gpu.memory_bytes)}; "
            f"weights {amount(Layout(1, 1).weight_bytes(self._shape))} {held_as(self._shape.storage)}; "
            f"KV of a token {self._shape.size.kv_bytes_per_token / halves / 1e3:,.1f} kB"
        )

    def _layout_table(self, choices: list[Choice], best: Choice) -> Iterator[str]:
        """Bytes of each GPU; tokens, requests and rates of all together."""
        lengths = (self._load.num_tokens, self._context)
        heads = ("weights", "a step", "KV", "KV tokens", *(f"of {length:,}" for length in lengths))
        yield f"{'':<26}{'each GPU':>36}{'':>12}{'most requests':>24}{'tokens/s':>12}"
        yield f"{'':<26}" + "".join(f"{head:>12}" for head in (*heads, f"at {self._load.streams:,}"))
        for choice in choices:
            mark = "* " if choice is best else "  "
            yield f"{mark + (choice[0].flags or 'one GPU'):<26}" + "".join(
                f"{cell:>12}" for cell in self._cells(choice)
            )

    def _cells(self, choice: Choice) -> Iterator[str]:
        layout, memory, expected = choice
        yield from (
            amount(size) for size in (memory.weight_bytes, memory.step_bytes, memory.num_pages * memory.page_bytes)
        )
        yield f"{memory.kv_tokens * layout.dp:,}"
        for length in (self._load.num_tokens, self._context):
            yield f"{memory.num_requests(length) * layout.dp:,}"
        yield f"{expected.output_tokens_per_second:,.0f}"

    def _notes(self, choices: list[Choice]) -> Iterator[str]:
        """What the table does not say of its layouts."""
        given, used = self._settings.machine.gpus, self._fitting.num_gpus
        if cost := act_order_cost(parts_of(self._shape), self._shape.storage.form):
            yield act_order_note(cost)
        if used < given:
            yield f"No layout of all {given} GPUs fits, so these take {used}. {self._working_tp(given)}"
        for layout in (choice[0] for choice in choices):
            if widened := layout.widened(self._shape):
                yield f"{layout.flags} cuts within groups that share a scale: {' and '.join(widened)} in 16 bits."
            if self._spans_nodes(layout):
                yield f"{layout.flags} computes across nodes; its rate is one without a network between them."

    def _working_tp(self, most: int) -> str:
        working = ", ".join(str(tp) for tp in range(1, most + 1) if self._shape.takes(tp))
        return f"Values of --tp that divide the model: {working}."

    def _expected_lines(self, layout: Layout, memory: Memory) -> Iterator[str]:
        load, gpu = self._load, self._gpu
        first = self._expectations.first_token_seconds(layout, memory, load)
        lengths = f"prompts of {load.input_len:,} and answers of {load.output_len:,}"
        yield f"Expected of {layout.flags or 'one GPU'}, {lengths}:"
        yield from self._load_table(layout, memory)
        yield (
            f"First token on an idle server: {first * 1e3:,.0f} ms, HTTP and tokenising left out. No prefix is cached."
        )
        yield f"Rates of the {gpu.name}: {gpu.source}."

    def _load_table(self, layout: Layout, memory: Memory) -> Iterator[str]:
        most = memory.num_requests(self._load.num_tokens) * layout.dp
        yield f"{'streams':>10}{'output tokens/s':>18}{'ITL p50, ms':>14}{'ITL p99, ms':>14}"
        for streams in (streams for streams in STREAMS if streams <= most):
            expected = self._expectations.at(layout, memory, msgspec.structs.replace(self._load, streams=streams))
            yield (
                f"{streams:>10,}{expected.output_tokens_per_second:>18,.0f}"
                f"{expected.itl_p50 * 1e3:>14.1f}{expected.itl_p99 * 1e3:>14.1f}"
            )
